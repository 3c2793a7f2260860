"""The Triton body against the dense float64 oracle. ``test_triton_attention.py`` runs this file in the interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.kernels import gpu_check, ops, reference, triton_attention, triton_kernels
from chunkc.kernels.cases import MixedCase, make_case, tolerance
from chunkc.kernels.tasks import AttentionShape, TaskTable
from chunkc.kernels.triton_config import MAX_CUT_ROWS, VARIANTS, plan_step

from .oracle import expected

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
assert triton_kernels.INTERPRETED.value, "set TRITON_INTERPRET=1"


@triton.jit
def _loop_kernel(bounds):
    for i in range(tl.load(bounds), tl.load(bounds + 1)):
        tl.store(bounds, i)


try:
    _loop_kernel[(1,)](torch.tensor([0, 2]))
except triton.runtime.interpreter.InterpreterError:  # Triton 3.6 with NumPy 2.4
    pytest.skip("the interpreter of this Triton cannot loop under this NumPy", allow_module_level=True)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that the body asks for is NaN (or, of integers, garbage) until it writes to it."""

    def poison(x: torch.Tensor) -> torch.Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else -(2**30))

    empty, new_empty = torch.empty, torch.Tensor.new_empty
    monkeypatch.setattr(triton_attention.torch, "empty", lambda *size, **options: poison(empty(*size, **options)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *size, **options: poison(new_empty(self, *size, **options))
    )


def close(got: torch.Tensor, case: MixedCase) -> None:
    """Within float32 sums and roundings to the dtype: of the result, and of the weights, which tensor cores take in
    16 bits. Rounding the weights moves a result by at most eps times the mean of |v| under them."""
    allowed = tolerance(case.q.dtype)
    want = expected(case)
    bound = allowed["atol"] + allowed["rtol"] * want.abs()
    if case.q.dtype != torch.float32:
        size = expected(dataclasses.replace(case, values=[v.abs() for v in case.values]))
        bound = bound + torch.finfo(case.q.dtype).eps * size
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), f"error {error.max():.2g} at {error.sub(bound).argmax()}"


def check(case: MixedCase, *, variant: str | None = None, **plan: int | None) -> torch.Tensor:
    got = triton_attention.mixed_attention(*case.arguments(case.plan(**plan)), variant=variant)
    assert got.dtype == case.q.dtype and got.is_contiguous()
    close(got, case)
    return got


@st.composite
def cases(draw: st.DrawFn) -> tuple[MixedCase, dict]:
    requests = draw(st.integers(1, 3))
    q_lens = [draw(st.sampled_from([0, 1, 1, 2, 7, 19])) for _ in range(requests)]
    kv_lens = [q + draw(st.sampled_from([0, 0, 1, 15, 16, 63, 65, 130])) for q in q_lens]
    kv_heads, group = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 17]))
    dims = st.sampled_from([16, 24, 40, 64, 80, 96, 112, 160, 256])
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
        page_size=draw(st.sampled_from([1, 2, 16, 48, 512])),
        dtype=draw(st.sampled_from(DTYPES)),
        sinks=draw(st.booleans()),
        alibi=draw(st.booleans()),
        softcap=draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        score_std=draw(st.sampled_from([1.0, 8.0])),
        padding=draw(st.integers(0, 2)) if sum(q_lens) else draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 2**16)),
    )
    options = {
        "q_block": draw(st.sampled_from([None, 8, 64])),
        "kv_split": draw(st.sampled_from([None, 16, 64])),
        "variant": draw(st.sampled_from([None, *VARIANTS])),
    }
    return case, options


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_all_features_together(drawn: tuple[MixedCase, dict]) -> None:
    case, options = drawn
    check(case, **options)


@pytest.mark.parametrize("group", [3, 5, 6, 7, 20])
def test_groups_in_a_mixed_batch(group: int) -> None:
    check(make_case([3, 1], [40, 70], AttentionShape(group, 1, 16, 16)))


@pytest.mark.parametrize(("qk_dim", "v_dim"), [(24, 24), (40, 40), (80, 80), (96, 64), (112, 112), (192, 128)])
def test_head_dims(qk_dim: int, v_dim: int) -> None:
    check(make_case([3, 1], [10, 40], AttentionShape(2, 1, qk_dim, v_dim), dtype=torch.bfloat16), kv_split=32)


@pytest.mark.parametrize("window", [1, 16, 17, 64])
def test_window_edges_at_decode(window: int) -> None:
    """A decode with window w sees itself and w - 1 keys before it; all slots further back are NaN, values too."""
    check(make_case([1, 1, 1], [16, 17, 80], AttentionShape(2, 1, 16, 16, window=window), page_size=4), kv_split=16)


def test_window_that_a_rolling_page_left_stale_tokens_in() -> None:
    """What lies before the window in the same page is another request's, large and finite: it must not count."""
    case = make_case([1, 5], [37, 60], AttentionShape(4, 2, 16, 16, window=9), page_size=16)
    stale = dataclasses.replace(case, k_pages=case.k_pages.nan_to_num(3e4), v_pages=case.v_pages.nan_to_num(3e4))
    assert torch.equal(check(case), check(stale))


@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_attention(variant: str) -> None:
    check(make_case([1, 20], [17, 40], AttentionShape(4, 2, 16, 16, chunk=7), page_size=4), variant=variant)


def test_softcap_survives_huge_scores() -> None:
    """Beyond |score / softcap| of 44 a naive tanh by exponentials overflows to NaN."""
    case = make_case([5, 1], [40, 70], AttentionShape(4, 2, 16, 16), softcap=5.0, score_std=1e4)
    assert check(case).isfinite().all()


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_sinks_far_from_the_scores(shift: float) -> None:
    case = make_case([5, 1], [40, 70], AttentionShape(4, 2, 16, 16), sinks=True)
    assert case.sinks is not None
    check(dataclasses.replace(case, sinks=case.sinks + shift), kv_split=16)


@pytest.mark.parametrize(("dtype", "features"), [(torch.float32, {"sinks": True}), (torch.bfloat16, {"softcap": 3.0})])
@pytest.mark.parametrize("window", [0, 33])
def test_alibi(dtype: torch.dtype, features: dict, window: int) -> None:
    case = make_case([1, 9], [90, 40], AttentionShape(6, 2, 16, 16, window=window), dtype=dtype, alibi=True, **features)
    out = check(case, kv_split=32)
    plain = dataclasses.replace(case, alibi_slopes=None)
    assert not torch.allclose(out, triton_attention.mixed_attention(*plain.arguments(plain.plan())), atol=0.05)


def test_requests_without_rows_and_rows_without_request() -> None:
    case = make_case([0, 4, 0, 1, 0], [9, 4, 0, 40, 1], AttentionShape(4, 2, 16, 16), padding=3)
    assert not check(case)[-3:].any()


def test_padded_request_without_keys_gives_zeros() -> None:
    case = make_case([2, 1], [20, 1], AttentionShape(4, 2, 16, 16), sinks=True)
    metadata = dataclasses.replace(
        case.metadata,
        kv_lens=torch.tensor([20, 0], dtype=torch.int32),
        slot_mapping=torch.cat([case.metadata.slot_mapping[:2], torch.tensor([-1])]),
    )
    case = dataclasses.replace(case, metadata=metadata)
    out = triton_attention.mixed_attention(*case.arguments(case.plan()))
    assert out[:2].isfinite().all() and out[:2].any() and not out[2].any()


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_in_any_piece_of_a_split_block(sinks: bool) -> None:
    """More rows than keys: the first rows stand before the first key. All their partials are empty, and merging two
    empty partials must give zeros, not NaN."""
    case = make_case([20], [20], AttentionShape(2, 1, 16, 16), page_size=4, sinks=sinks)
    m = case.metadata
    slots = torch.cat([torch.tensor([-1, -1]), m.slot_mapping[:18]])
    metadata = dataclasses.replace(m, kv_lens=torch.tensor([18], dtype=torch.int32), slot_mapping=slots)
    case = dataclasses.replace(case, metadata=metadata)
    table = case.plan(kv_split=8)
    assert len(table.merges)
    out = triton_attention.mixed_attention(*case.arguments(table))
    assert not out[:2].any()
    torch.testing.assert_close(out, reference.mixed_attention(*case.arguments(table)), rtol=1e-5, atol=1e-6)


def test_nothing_to_do() -> None:
    case = make_case([0], [3], AttentionShape(4, 2, 16, 16), padding=2)
    table = case.plan()
    assert len(table.tasks) == 0 and not triton_attention.mixed_attention(*case.arguments(table)).any()


def test_one_token_prefill_chunk_is_bottom_right_aligned() -> None:
    """The last chunk of a prompt may hold one token; it must equal the last row of the prompt in one go."""
    whole = make_case([19], [19], AttentionShape(6, 2, 16, 16))
    args = whole.arguments(whole.plan())
    out = triton_attention.mixed_attention(*args)  # the pages now hold the prompt
    close(out, whole)
    last = dataclasses.replace(
        whole,
        q=whole.q[18:],
        k=whole.k[18:],
        v=whole.v[18:],
        k_pages=args[3],
        v_pages=args[4],
        metadata=dataclasses.replace(
            whole.metadata,
            q_offsets=torch.tensor([0, 1], dtype=torch.int32),
            slot_mapping=whole.metadata.slot_mapping[18:],
        ),
    )
    got = triton_attention.mixed_attention(*last.arguments(last.plan()))
    torch.testing.assert_close(got, out[18:], rtol=1e-5, atol=1e-6)


def test_splits_change_rounding_only_and_runs_change_nothing() -> None:
    case = make_case([1, 3], [300, 100], AttentionShape(6, 2, 16, 16), sinks=True)
    results = [check(case, kv_split=split) for split in (16, 16, 112, 1024)]
    assert torch.equal(results[0], results[1])
    for other in results[2:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


def test_order_of_tasks_does_not_matter() -> None:
    case = make_case([1, 9], [150, 40], AttentionShape(4, 2, 16, 16))
    table = case.plan(kv_split=32, q_block=8)
    want = triton_attention.mixed_attention(*case.arguments(table))
    shuffled = TaskTable(table.tasks[torch.randperm(len(table.tasks))], table.merges)
    assert torch.equal(triton_attention.mixed_attention(*case.arguments(shuffled)), want)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_table_may_be_longer_than_its_plan(variant: str) -> None:
    """A recorded CUDA graph has tables of one length: rows of -1 end them."""
    case = make_case([1, 9], [150, 40], AttentionShape(4, 2, 16, 16), sinks=True)
    table = case.plan(kv_split=32)
    padded = TaskTable(
        *(torch.cat([x, torch.full((9, 8), -1, dtype=torch.int32)]) for x in (table.tasks, table.merges))
    )
    got = triton_attention.mixed_attention(*case.arguments(padded), variant=variant)
    close(got, case)


def test_cut_blocks_too_large_for_scratch_become_nan_and_write_nowhere_else() -> None:
    case = make_case([100], [100], AttentionShape(1, 1, 16, 16), page_size=64)
    assert MAX_CUT_ROWS < 100
    table = case.plan(q_block=100, kv_split=64)
    assert len(table.merges) == 1
    out = triton_attention.mixed_attention(*case.arguments(table))
    assert out[-1].isnan().all()


def test_page_placement_does_not_matter() -> None:
    """The same tokens in other pages, with other garbage around them: the same bits."""
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 16, 16), page_size=8)
    moved_to = torch.randperm(case.k_pages.shape[0])

    def move(x: torch.Tensor, garbage: float) -> torch.Tensor:
        return torch.full_like(x, garbage).index_copy(0, moved_to, x.nan_to_num(nan=garbage))

    m = case.metadata
    moved = dataclasses.replace(
        case,
        k_pages=move(case.k_pages, 1e30),
        v_pages=move(case.v_pages, -1e30),
        metadata=dataclasses.replace(
            m,
            page_table=torch.where(m.page_table >= 0, moved_to[m.page_table.long()].int(), m.page_table),
            slot_mapping=moved_to[m.slot_mapping // 8] * 8 + m.slot_mapping % 8,
        ),
    )
    assert torch.equal(check(case), triton_attention.mixed_attention(*moved.arguments(moved.plan())))


def test_pages_get_exactly_the_new_tokens() -> None:
    case = make_case([4, 1], [50, 70], AttentionShape(20, 10, 24, 40), page_size=8, padding=2)
    args = case.arguments(case.plan())
    triton_attention.mixed_attention(*args)
    slots = case.metadata.slot_mapping[:5]
    for pages, before, new in ((args[3], case.k_pages, case.k), (args[4], case.v_pages, case.v)):
        want = before.clone()
        want[slots // 8, :, slots % 8] = new[:5]
        torch.testing.assert_close(pages, want, rtol=0, atol=0, equal_nan=True)


def test_strided_inputs() -> None:
    """q, k and v as slices of one fused projection; key pages as slices, with strides of their own."""
    case = make_case([4, 1], [50, 70], AttentionShape(6, 2, 32, 32), dtype=torch.bfloat16)
    fused = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], 1)
    q, k, v = (x.unflatten(1, (-1, 32)) for x in fused.split([6 * 32, 2 * 32, 2 * 32], 1))
    plain = case.arguments(case.plan())
    wide = torch.full((*plain[3].shape[:2], 2, *plain[3].shape[2:]), torch.nan, dtype=torch.bfloat16)
    wide[:, :, 1] = plain[3]
    strided = (q, k, v, wide[:, :, 1], *plain[4:])
    assert not strided[3].is_contiguous() and not q.is_contiguous()
    got = triton_attention.mixed_attention(*strided)
    assert torch.equal(got, triton_attention.mixed_attention(*case.arguments(case.plan())))
    assert wide[:, :, 0].isnan().all()


def test_nan_of_one_request_stays_there_and_shows() -> None:
    case = make_case([3, 3], [20, 30], AttentionShape(4, 2, 16, 16))
    case.q[0] = torch.nan
    out = triton_attention.mixed_attention(*case.arguments(case.plan()))
    assert out[0].isnan().all() and out[1:].isfinite().all()


def test_offsets_beyond_32_bits_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that lie past 2**31 elements of the cache; memory that nothing touches costs nothing."""
    # After a launch the interpreter copies every tensor back from the CPU, all of it, even if it lies there.
    monkeypatch.setattr(torch.UntypedStorage, "copy_", lambda storage, source, *_: storage)
    case = make_case([1], [20], AttentionShape(2, 1, 64, 64), page_size=16)
    far = 2**31 // (16 * 64) + 5
    args = list(case.arguments(case.plan()))
    for i, near in ((3, case.k_pages), (4, case.v_pages)):
        # of NumPy, as torch.empty is poisoned here, which would touch all of it
        args[i] = torch.from_numpy(np.empty((far + near.shape[0], 1, 16, 64), dtype=np.float32))
        args[i][far:] = near
    m = case.metadata
    args[7], args[8] = m.page_table + far, m.slot_mapping + far * 16
    close(triton_attention.mixed_attention(*args), case)


def test_a_compiled_graph_calls_it_and_it_writes_the_pages() -> None:
    """The registered entry, registered for CPU for once."""
    case = make_case([4, 1], [20, 30], AttentionShape(4, 2, 16, 16), sinks=True)
    library = torch.library.Library("chunkc", "IMPL")
    library.impl("mixed_attention", ops._triton_mixed_attention, "CPU")
    try:
        args = case.arguments(case.plan())
        got = torch.compile(lambda q, *rest: ops.mixed_attention(q * 1.0, *rest) + 0.0, backend="aot_eager")(*args)
    finally:
        library._destroy()
    close(got, case)
    slots = case.metadata.slot_mapping
    assert torch.equal(args[3][slots // 16, :, slots % 16], case.k)


def test_the_check_for_a_gpu_finds_nothing_here_and_finds_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """``gpu_check`` itself, on small cases; its own exact results against those of the tests."""
    cpu, options = torch.device("cpu"), {"dtype": torch.bfloat16, "sinks": True, "softcap": 3.0, "alibi": True}
    shape = AttentionShape(4, 2, 16, 24, window=9, chunk=16)
    torch.testing.assert_close(*(f(make_case([3, 1], [20, 40], shape, **options)) for f in (gpu_check.dense, expected)))
    check = gpu_check.Check("small", (3, 1), (20, 40), shape, options, {"kv_split": 16})
    assert gpu_check.excess(check, cpu) <= 1
    batch = gpu_check.make_batch([5, 1], [20, 33], AttentionShape(4, 2, 16, 16), cpu)
    torch.testing.assert_close(batch.run(), reference.mixed_attention(*batch.arguments), rtol=0.01, atol=0.01)
    assert batch.kv_bytes == 53 * 2 * 32 * 2 and batch.flops == (18 * 5 + 33) * 4 * 32 * 2
    monkeypatch.setattr(gpu_check, "make_batch", lambda *_: batch)
    monkeypatch.setattr(gpu_check, "copy_bandwidth", lambda _: 1.0)
    monkeypatch.setattr(gpu_check, "matrix_rate", lambda _: 1.0)
    monkeypatch.setattr(gpu_check, "median_ms", lambda function: [function(), 2.0][1])
    times = gpu_check.time_all(cpu)
    assert times["16384 prefill [TFLOP/s]"] == batch.flops / 2e9
    assert times["32 decodes at 4096, of copy bandwidth [%]"] == pytest.approx(100 * batch.kv_bytes / 2e6)

    monkeypatch.setattr(triton_attention, "mixed_attention", lambda q, *_, **__: q[..., :1].expand(4, 4, 24) * 1.0)
    assert gpu_check.excess(check, cpu) > 1


@pytest.mark.parametrize(
    ("index", "change", "error", "match"),
    [
        (0, torch.Tensor.double, TypeError, "float32"),
        (1, lambda k: k[:, :1], ValueError, "do not fit"),
        (5, torch.Tensor.long, TypeError, "q_offsets"),
        (9, lambda tasks: tasks[:, :7], ValueError, "tasks"),
        (11, lambda sinks: sinks[:3], ValueError, "sink"),
        (12, lambda slopes: slopes[:3], ValueError, "slope"),
    ],
)
def test_what_does_not_fit_is_refused(index: int, change, error: type, match: str) -> None:
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 32, 32), sinks=True, alibi=True)
    args = list(case.arguments(case.plan()))
    args[index] = change(args[index])
    with pytest.raises(error, match=match):
        triton_attention.mixed_attention(*args)


@pytest.mark.parametrize(("q_lens", "kv_lens"), [((70,), (400,)), ((1, 1), (300, 40)), ((20, 1), (40, 300))])
def test_plans_of_a_step_fit_the_tiles_and_the_scratch(q_lens: tuple, kv_lens: tuple) -> None:
    case = make_case(q_lens, kv_lens, AttentionShape(2, 1, 16, 16))
    m, cpu = case.metadata, triton_attention.device_of(torch.device("cpu"))
    table = plan_step(m.q_offsets, m.kv_lens, case.shape, page_size=16, itemsize=4, device=cpu)
    close(triton_attention.mixed_attention(*case.arguments(table)), case)
    wide = dataclasses.replace(cpu, units=132)  # too many for a short prefill, which is then cut along the keys
    table = plan_step(m.q_offsets, m.kv_lens, case.shape, page_size=16, itemsize=2, device=wide)
    assert len(table.merges) and (table.merges[:, 3] - table.merges[:, 2]).max() <= MAX_CUT_ROWS
