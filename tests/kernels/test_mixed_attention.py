"""``chunkc::mixed_attention``: both CPU bodies against a dense float64 oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.kernels import cpu_backend, ops, reference
from chunkc.kernels.cases import MixedCase, make_case, tolerance
from chunkc.kernels.tasks import AttentionShape, Merge, Task, TaskTable, plan_tasks

from .oracle import expected

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["reference", "cpp"])
def body(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    if request.param == "reference":
        return reference.mixed_attention
    assert cpu_backend.load() and cpu_backend.active_body() == "cpp"
    return ops.mixed_attention


def check(body: Callable[..., torch.Tensor], case: MixedCase, **plan: int | None) -> torch.Tensor:
    got = body(*case.arguments(case.plan(**plan)))
    assert got.dtype == case.q.dtype and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected(case), **tolerance(case.q.dtype))
    return got


@st.composite
def cases(draw: st.DrawFn) -> tuple[MixedCase, dict]:
    requests = draw(st.integers(1, 5))
    q_lens = [draw(st.sampled_from([0, 1, 1, 1, 2, 7, 23])) for _ in range(requests)]
    prefix = st.sampled_from([0, 0, 1, 15, 16, 63, 64, 65, 130])
    kv_lens = [q + draw(prefix) for q in q_lens]
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    dims = st.sampled_from([16, 24, 40, 64, 80, 96, 112, 128, 256])
    qk_dim = draw(dims)
    shape = AttentionShape(
        kv_heads * group,
        kv_heads,
        qk_dim,
        draw(st.one_of(st.just(qk_dim), dims)),
        window=draw(st.sampled_from([0, 0, 1, 2, 16, 40])),
        chunk=draw(st.sampled_from([0, 0, 0, 1, 8, 50])),
    )
    case = make_case(
        q_lens,
        kv_lens,
        shape,
        page_size=draw(st.sampled_from([1, 2, 16, 48, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        score_std=draw(st.sampled_from([1.0, 8.0])),
        padding=draw(st.integers(0, 2)) if sum(q_lens) else draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**16)),
    )
    plan = {
        "units": draw(st.sampled_from([1, 2, 64])),
        "q_block": draw(st.sampled_from([None, 1, 8, 64])),
        "kv_split": draw(st.sampled_from([None, None, 1, 16, 64])),
    }
    return case, plan


@settings(max_examples=300, deadline=None)
@given(cases())
def test_reference_and_cpp_agree_with_the_oracle(drawn: tuple[MixedCase, dict]) -> None:
    case, plan = drawn
    assert cpu_backend.load()
    table, want = case.plan(**plan), expected(case)
    for run in (reference.mixed_attention, ops.mixed_attention):
        got = run(*case.arguments(table))
        torch.testing.assert_close(got.double(), want, **tolerance(case.q.dtype), msg=lambda m, r=run: f"{r}: {m}")


@pytest.mark.parametrize("group", range(1, 9))
def test_groups(body: Callable, group: int) -> None:
    check(body, make_case([3, 1, 20], [40, 70, 20], AttentionShape(2 * group, 2, 32, 32)))


@pytest.mark.parametrize("dim", [16, 24, 40, 64, 80, 96, 112, 160, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims(body: Callable, dim: int, dtype: torch.dtype) -> None:
    check(body, make_case([3, 1, 9], [30, 70, 9], AttentionShape(6, 2, dim, dim), dtype=dtype))


@pytest.mark.parametrize(("qk_dim", "v_dim"), [(192, 128), (96, 64), (24, 16), (16, 40)])
def test_values_of_another_dim(body: Callable, qk_dim: int, v_dim: int) -> None:
    check(body, make_case([6, 1], [30, 70], AttentionShape(4, 4, qk_dim, v_dim)), kv_split=16)


@pytest.mark.parametrize("page_size", [1, 5, 16, 64, 128, 512])
def test_page_sizes(body: Callable, page_size: int) -> None:
    check(body, make_case([6, 1, 1], [130, 129, 1], AttentionShape(4, 2, 32, 32), page_size=page_size))


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 1000])
@pytest.mark.parametrize("kv_split", [None, 16])
def test_window_edges(body: Callable, window: int, kv_split: int | None) -> None:
    """A decode with window w sees itself and w - 1 keys before it; all slots further back are NaN."""
    shape = AttentionShape(4, 2, 16, 16, window=window)
    check(body, make_case([1, 1, 1, 5], [16, 17, 18, 80], shape, page_size=4), kv_split=kv_split)


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_chunked_attention(body: Callable, chunk: int) -> None:
    shape = AttentionShape(4, 2, 16, 16, chunk=chunk)
    check(body, make_case([1, 1, 20], [16, 17, 40], shape, page_size=4), q_block=8)


def test_softcap_survives_huge_scores(body: Callable) -> None:
    """Beyond |score / softcap| of 44 a naive tanh by exponentials overflows to NaN."""
    case = make_case([9, 1], [60, 90], AttentionShape(4, 2, 64, 64), softcap=5.0, score_std=1e4)
    assert check(body, case).isfinite().all()


def test_scores_far_below_zero_and_sinks_above_them(body: Callable) -> None:
    case = make_case([9, 1], [60, 90], AttentionShape(4, 2, 64, 64), sinks=True)
    assert case.sinks is not None
    for shift in (-200.0, 0.0, 200.0):
        check(body, dataclasses.replace(case, sinks=case.sinks + shift), kv_split=16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [{}, {"sinks": True, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("shape", [(6, 2, 0, 0), (5, 5, 33, 0), (12, 1, 0, 40)], ids=str)
@pytest.mark.parametrize("kv_split", [None, 16])
def test_alibi(body: Callable, shape: tuple, features: dict, dtype: torch.dtype, kv_split: int | None) -> None:
    """Few rows and many, and a block of rows whose heads have slopes of their own."""
    heads, kv_heads, window, chunk = shape
    shape = AttentionShape(heads, kv_heads, 32, 24, window=window, chunk=chunk)
    case = make_case([1, 2, 30, 1], [150, 70, 90, 1], shape, dtype=dtype, alibi=True, **features)
    out = check(body, case, kv_split=kv_split)
    plain = body(*dataclasses.replace(case, alibi_slopes=None).arguments(case.plan(kv_split=kv_split)))
    assert not torch.allclose(out, plain, atol=0.05)


def test_alibi_without_slope_changes_nothing(body: Callable) -> None:
    case = make_case([1, 30], [150, 90], AttentionShape(6, 2, 32, 32), softcap=3.0)
    flat = dataclasses.replace(case, alibi_slopes=torch.zeros(6))
    torch.testing.assert_close(check(body, flat), check(body, case), rtol=1e-6, atol=1e-6)


def test_alibi_far_out(body: Callable) -> None:
    """A steep slope leaves the nearest key alone in both directions; a key that is not seen weighs nothing."""
    case = make_case([1, 40], [3000, 40], AttentionShape(2, 1, 16, 16), page_size=64)
    steep = dataclasses.replace(case, alibi_slopes=torch.tensor([1e4, -1e4]))
    out = check(body, steep, kv_split=512)
    torch.testing.assert_close(out[0], torch.cat([case.values[0][-1], case.values[0][0]]), rtol=1e-5, atol=1e-5)


def test_requests_without_rows_and_rows_without_request(body: Callable) -> None:
    case = make_case([0, 4, 0, 1, 0], [9, 4, 0, 40, 1], AttentionShape(4, 2, 16, 16), padding=3)
    assert not check(body, case)[-3:].any()


def test_padded_request_without_keys_gives_zeros(body: Callable) -> None:
    case = make_case([2, 1], [20, 1], AttentionShape(4, 2, 16, 16), sinks=True)
    metadata = dataclasses.replace(
        case.metadata,
        kv_lens=torch.tensor([20, 0], dtype=torch.int32),
        slot_mapping=torch.cat([case.metadata.slot_mapping[:2], torch.tensor([-1])]),
    )
    case = dataclasses.replace(case, metadata=metadata)
    out = body(*case.arguments(case.plan()))
    assert out[:2].isfinite().all() and out[:2].any() and not out[2].any()


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_in_any_piece_of_a_split_block(body: Callable, sinks: bool) -> None:
    """More rows than keys: the first rows stand before the first key, and all their partials are empty."""
    case = make_case([40], [40], AttentionShape(2, 1, 16, 16), page_size=4, sinks=sinks)
    m = case.metadata
    slots = torch.cat([torch.tensor([-1, -1]), m.slot_mapping[:38]])
    metadata = dataclasses.replace(m, kv_lens=torch.tensor([38], dtype=torch.int32), slot_mapping=slots)
    shorter = dataclasses.replace(case, metadata=metadata)
    table = shorter.plan(kv_split=8)
    assert len(table.merges)
    out = body(*shorter.arguments(table))
    assert not out[:2].any()
    rest = make_case([38], [38], AttentionShape(2, 1, 16, 16), page_size=4)
    rest = dataclasses.replace(rest, q=case.q[2:], k=case.k[2:], v=case.v[2:], sinks=case.sinks)
    torch.testing.assert_close(out[2:], body(*rest.arguments(rest.plan())), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sink", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("kv_split", [None, 8])
def test_a_sink_far_below_all_scores_has_no_share(body: Callable, kv_split: int | None, sink: float) -> None:
    """Not even where a row sees no key: that gives zeros, as without sinks."""
    case = make_case([40, 2], [40, 2], AttentionShape(4, 2, 16, 16), page_size=4)
    m = case.metadata
    slots = torch.cat([torch.tensor([-1, -1]), m.slot_mapping[:38], torch.tensor([-1]), m.slot_mapping[-2:-1]])
    lens = torch.tensor([38, 1], dtype=torch.int32)
    plain = dataclasses.replace(case, metadata=dataclasses.replace(m, kv_lens=lens, slot_mapping=slots))
    closed = dataclasses.replace(plain, sinks=torch.full((4,), sink))
    table = plain.plan(kv_split=kv_split)
    out = body(*closed.arguments(table))
    assert torch.equal(out, body(*plain.arguments(table)))
    assert not out[:2].any() and not out[40].any() and out[2:40].all(-1).all()


def test_nothing_to_do(body: Callable) -> None:
    case = make_case([0], [3], AttentionShape(4, 2, 16, 16), padding=2)
    table = case.plan()
    assert len(table.tasks) == 0 and not body(*case.arguments(table)).any()


def test_one_token_prefill_chunk_is_bottom_right_aligned(body: Callable) -> None:
    """The last chunk of a prompt may hold one token; it must equal the last row of the prompt in one go."""
    whole = make_case([37], [37], AttentionShape(6, 2, 32, 32))
    out = check(body, whole)
    k_pages, v_pages = whole.arguments(whole.plan())[3:5]
    args = list(whole.arguments(whole.plan()))
    args[3], args[4] = k_pages, v_pages
    body(*args)  # the pages now hold the prompt
    last = dataclasses.replace(
        whole,
        q=whole.q[36:],
        k=whole.k[36:],
        v=whole.v[36:],
        k_pages=k_pages,
        v_pages=v_pages,
        metadata=dataclasses.replace(
            whole.metadata,
            q_offsets=torch.tensor([0, 1], dtype=torch.int32),
            slot_mapping=whole.metadata.slot_mapping[36:],
        ),
    )
    torch.testing.assert_close(body(*last.arguments(last.plan())), out[36:], rtol=1e-5, atol=1e-6)


def test_number_of_splits_changes_rounding_only(body: Callable) -> None:
    case = make_case([1, 3, 1], [900, 300, 64], AttentionShape(6, 2, 32, 32), sinks=True)
    results = [body(*case.arguments(case.plan(kv_split=split))) for split in (None, 16, 64, 112, 1024)]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=2e-6)


def test_task_order_does_not_matter(body: Callable) -> None:
    case = make_case([1, 30, 1], [300, 90, 64], AttentionShape(6, 2, 32, 32))
    table = case.plan(kv_split=32)
    shuffled = TaskTable(table.tasks[torch.randperm(len(table.tasks))].contiguous(), table.merges)
    assert torch.equal(body(*case.arguments(table)), body(*case.arguments(shuffled)))


def test_bitwise_equal_from_run_to_run(body: Callable) -> None:
    case = make_case([1, 60, 1, 1], [700, 90, 400, 64], AttentionShape(6, 2, 64, 64), dtype=torch.bfloat16)
    table = case.plan(kv_split=64)
    first = body(*case.arguments(table))
    assert all(
        torch.equal(first, body(*case.arguments(table))) for _ in range(10 if body is ops.mixed_attention else 1)
    )


def test_page_placement_does_not_matter(body: Callable) -> None:
    """The same tokens in other pages, with other garbage around them: the same bits."""
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 32, 32), page_size=8)
    pages = case.k_pages.shape[0]
    moved_to = torch.randperm(pages)

    def move(x: torch.Tensor, garbage: float) -> torch.Tensor:
        return torch.full_like(x, garbage).index_copy(0, moved_to, x.nan_to_num(nan=garbage))

    m = case.metadata
    slots = moved_to[m.slot_mapping // 8] * 8 + m.slot_mapping % 8
    table = torch.where(m.page_table >= 0, moved_to[m.page_table.long()].int(), m.page_table)
    moved = dataclasses.replace(
        case,
        k_pages=move(case.k_pages, 1e30),
        v_pages=move(case.v_pages, -1e30),
        metadata=dataclasses.replace(m, page_table=table, slot_mapping=slots),
    )
    assert torch.equal(body(*case.arguments(case.plan())), body(*moved.arguments(moved.plan())))


def test_a_request_does_not_depend_on_its_batch_mates(body: Callable) -> None:
    shape = AttentionShape(4, 2, 32, 32)
    together = make_case([5, 1, 9], [50, 70, 9], shape)
    out = check(body, together)
    m = together.metadata
    for r in range(3):
        rows = slice(int(m.q_offsets[r]), int(m.q_offsets[r + 1]))
        alone = dataclasses.replace(
            together,
            q=together.q[rows],
            k=together.k[rows],
            v=together.v[rows],
            metadata=dataclasses.replace(
                m,
                q_offsets=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                kv_lens=m.kv_lens[r : r + 1],
                page_table=m.page_table[r : r + 1],
                slot_mapping=m.slot_mapping[rows],
            ),
        )
        torch.testing.assert_close(body(*alone.arguments(alone.plan())), out[rows], rtol=1e-5, atol=1e-6)


def test_pages_get_exactly_the_new_tokens(body: Callable) -> None:
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 24, 40), page_size=8, padding=2)
    args = case.arguments(case.plan())
    body(*args)
    slots = case.metadata.slot_mapping[:5]
    for pages, before, new in ((args[3], case.k_pages, case.k), (args[4], case.v_pages, case.v)):
        want = before.clone()
        want[slots // 8, :, slots % 8] = new[:5]
        torch.testing.assert_close(pages, want, rtol=0, atol=0, equal_nan=True)


def test_strided_inputs(body: Callable) -> None:
    """q, k and v as slices of one fused projection; pages as slices along the tokens."""
    case = make_case([4, 1], [50, 70], AttentionShape(6, 2, 32, 32), dtype=torch.bfloat16)
    fused = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], 1)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in fused.split([6 * 32, 2 * 32, 2 * 32], 1))
    plain = case.arguments(case.plan())
    wide = [torch.full((*p.shape[:2], 2, *p.shape[2:]), torch.nan, dtype=p.dtype) for p in plain[3:5]]
    for w, p in zip(wide, plain[3:5], strict=True):
        w[:, :, 1] = p
    strided = (q, k, v, wide[0][:, :, 1], wide[1][:, :, 1], *plain[5:])
    assert not strided[3].is_contiguous() and not q.is_contiguous()
    assert torch.equal(body(*strided), body(*plain))
    assert all(w[:, :, 0].isnan().all() for w in wide)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(strided[3:5], plain[3:5], strict=True))


def test_inputs_whose_last_dim_is_not_contiguous(body: Callable) -> None:
    case = make_case([4, 1], [50, 70], AttentionShape(6, 2, 32, 32))
    args = list(case.arguments(case.plan()))
    args[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in args[:3]]
    assert torch.equal(body(*args), body(*case.arguments(case.plan())))


def test_nan_of_one_request_stays_there_and_shows(body: Callable) -> None:
    case = make_case([3, 3], [20, 30], AttentionShape(4, 2, 16, 16))
    case.q[0] = torch.nan
    out = body(*case.arguments(case.plan()))
    assert out[0].isnan().all() and out[1:].isfinite().all()


@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    assert cpu_backend.load()
    case = make_case([1, 60, 1, 1], [700, 90, 400, 64], AttentionShape(6, 2, 64, 64), sinks=True)
    table = case.plan(kv_split=64)
    want = case.run(table)
    torch.set_num_threads(threads)
    assert all(torch.equal(case.run(table), want) for _ in range(5))


def test_two_python_threads_at_once() -> None:
    assert cpu_backend.load()
    cases = [make_case([1, 30], [300 + i, 40], AttentionShape(6, 2, 32, 32), seed=i) for i in range(8)]
    want = [case.run(case.plan(kv_split=32)) for case in cases]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda case: case.run(case.plan(kv_split=32)), cases * 4))
    assert all(torch.equal(a, b) for a, b in zip(got, want * 4, strict=True))


def test_cpp_refuses_what_it_cannot_do_and_writes_nowhere_else() -> None:
    assert cpu_backend.load()
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 32, 32))
    table = case.plan()

    def with_argument(index: int, value: object) -> tuple:
        args = case.arguments(table)
        return (*args[:index], value, *args[index + 1 :])

    for index, value, error, match in (
        (0, case.q.double(), TypeError, "dtype"),
        (1, case.k[:, :1], ValueError, "do not fit"),
        (5, case.metadata.q_offsets.long(), TypeError, "q_offsets"),
        (7, torch.full_like(case.metadata.page_table, 10**6), IndexError, "page"),
        (8, case.metadata.slot_mapping + 10**6, IndexError, "slot"),
        (9, table.tasks + 1, IndexError, "task"),
        (11, torch.zeros(3), ValueError, "sink"),
        (12, torch.zeros(3), ValueError, "slope"),
    ):
        with pytest.raises(error, match=match):
            ops.mixed_attention(*with_argument(index, value))


@pytest.mark.parametrize(
    ("table", "row", "column", "value"),
    [
        *(("tasks", 3, "merge", value) for value in (-1, 1, 5000, 10**8)),
        *(("tasks", 3, "partial", value) for value in (-1, 0, 1, 5000, 10**8)),
        *(("merges", 1, "request", value) for value in (-1, 1, 5000)),
        *(("merges", 1, "kv_head", value) for value in (-1, 0, 5000, 10**8)),
        *(("merges", 1, "row_begin", value) for value in (-1, 2, 5000)),
        *(("merges", 1, "row_end", value) for value in (-1, 0, 5000, 2**31 - 1)),
        *(("merges", 1, "partial", value) for value in (-1, 0, 10**8)),
        *(("merges", 1, "num_splits", value) for value in (-1, 0, 1, 5000, 2**31 - 1)),
    ],
)
def test_cpp_refuses_tables_that_do_not_fit_together(table: str, row: int, column: str, value: int) -> None:
    """Before anything is written: pages are as they were."""
    assert cpu_backend.load()
    case = make_case([1, 1], [300, 200], AttentionShape(24, 8, 64, 64))
    plan = case.plan(kv_split=64)
    index = (Task if table == "tasks" else Merge)._fields.index(column)
    broken = getattr(plan, table).clone()
    assert broken[row, index] != value
    broken[row, index] = value
    given = case.arguments(dataclasses.replace(plan, **{table: broken}))
    with pytest.raises(IndexError, match="merge"):
        ops.mixed_attention(*given)
    assert torch.equal(given[3].view(torch.int32), case.k_pages.view(torch.int32))


def test_cpp_refuses_pieces_that_are_missing_or_there_twice() -> None:
    assert cpu_backend.load()
    case = make_case([1, 1], [300, 200], AttentionShape(24, 8, 64, 64))
    plan = case.plan(kv_split=64)
    for tasks in (plan.tasks[1:], torch.cat([plan.tasks, plan.tasks[:1]])):
        with pytest.raises(IndexError, match="merge"):
            ops.mixed_attention(*case.arguments(dataclasses.replace(plan, tasks=tasks.contiguous())))


@pytest.mark.parametrize("value", [-1, -(2**31), 100, 2**31 - 1])
@pytest.mark.parametrize(("request_", "page"), [(0, 0), (0, 12), (1, 3), (2, 4)])
def test_cpp_refuses_pages_that_are_not_in_the_cache_before_it_writes(request_: int, page: int, value: int) -> None:
    """Those that a task reads keys of; what is behind a window or a request's end is never looked at."""
    assert cpu_backend.load()
    case = make_case([30, 1, 1], [200, 50, 80], AttentionShape(4, 2, 32, 32))
    assert case.k_pages.shape[0] <= 100
    given = list(case.arguments(case.plan(kv_split=64)))
    given[7] = given[7].clone()
    given[7][request_, page] = value
    with pytest.raises(IndexError, match=f"page {value} is not in the cache"):
        ops.mixed_attention(*given)
    for pages, before in zip(given[3:5], (case.k_pages, case.v_pages), strict=True):
        assert torch.equal(pages.view(torch.int32), before.view(torch.int32))


def test_pages_that_no_task_reads_may_be_anything() -> None:
    assert cpu_backend.load()
    case = make_case([1, 0, 20], [200, 50, 80], AttentionShape(4, 2, 32, 32, window=33))
    given = list(case.arguments(case.plan()))
    given[7] = given[7].clone()
    given[7][0, :10], given[7][1], given[7][2, 5:] = 10**9, -7, -(2**31)
    given[7][2, 0] = 10**9
    torch.testing.assert_close(ops.mixed_attention(*given).double(), expected(case), **tolerance(torch.float32))


@pytest.mark.parametrize("slot", [2**62, 16 * 100])
def test_cpp_refuses_slots_that_are_not_in_the_cache_before_it_writes(slot: int) -> None:
    assert cpu_backend.load()
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 32, 32))
    given = list(case.arguments(case.plan()))
    given[8] = given[8].clone()
    given[8][-1] = slot
    with pytest.raises(IndexError, match=f"slot {slot} is not in the cache"):
        ops.mixed_attention(*given)
    for pages, before in zip(given[3:5], (case.k_pages, case.v_pages), strict=True):
        assert torch.equal(pages.view(torch.int32), before.view(torch.int32))


def test_pages_without_slots_and_nothing_to_do() -> None:
    assert cpu_backend.load()
    case = make_case([0], [3], AttentionShape(4, 2, 16, 16), padding=2)
    given = list(case.arguments(case.plan()))
    given[3:5] = [pages[:, :, :0] for pages in given[3:5]]
    assert not ops.mixed_attention(*given).any()


@pytest.mark.parametrize("arguments", [(0, 1, 3), (2, 4)])
def test_cpp_refuses_heads_without_elements(arguments: tuple[int, ...]) -> None:
    assert cpu_backend.load()
    case = make_case([1], [30], AttentionShape(4, 2, 16, 16))
    given = list(case.arguments(case.plan()))
    for index in arguments:
        given[index] = given[index][..., :0]
    with pytest.raises(ValueError, match="do not fit"):
        ops.mixed_attention(*given)


def test_offsets_beyond_32_bits_of_elements() -> None:
    """Pages that lie past 2**31 elements of the cache; memory that nothing touches costs nothing."""
    assert cpu_backend.load()
    shape = AttentionShape(2, 1, 64, 64)
    case = make_case([1], [20], shape, page_size=16)
    far = 2**31 // (16 * 64) + 5
    pages = []
    for near in (case.k_pages, case.v_pages):
        big = torch.empty(far + near.shape[0], 1, 16, 64)
        big[far:] = near
        pages.append(big)
    m = case.metadata
    args = list(case.arguments(case.plan()))
    args[3:5] = pages
    args[7], args[8] = m.page_table + far, m.slot_mapping + far * 16
    torch.testing.assert_close(ops.mixed_attention(*args).double(), expected(case), **tolerance(torch.float32))


def test_four_thousand_requests() -> None:
    assert cpu_backend.load()
    case = make_case([1] * 4096, [1 + i % 7 for i in range(4096)], AttentionShape(2, 1, 16, 16), page_size=4)
    got = case.run()
    torch.testing.assert_close(got.double(), expected(case), **tolerance(torch.float32))
    assert plan_tasks(case.metadata.q_offsets, case.metadata.kv_lens, case.shape, page_size=4, units=2)
