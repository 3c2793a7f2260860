"""``chunkc::mixed_attention`` with cosines and sines: what it rotates, where that goes, and what it refuses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chunkc.kernels import cpu_backend, ops, reference, triton_attention
from chunkc.kernels.cases import MixedCase, make_case
from chunkc.kernels.tasks import AttentionShape

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", params=["reference", "cpp"])
def body(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    if request.param == "reference":
        return reference.mixed_attention
    assert cpu_backend.load()
    return ops.mixed_attention


def tables_of(case: MixedCase, size: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, size] whose two halves differ, as those of no model do."""
    angles = torch.rand(len(case.q), size, generator=torch.Generator().manual_seed(seed)) * 7
    return angles.cos().to(case.q.dtype), angles.sin().to(case.q.dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The meaning once more, element by element."""
    size, result = cos.shape[1], x.clone()
    for i in range(size):
        other = -x[..., i + size // 2].float() if i < size // 2 else x[..., i - size // 2].float()
        straight, crossed = x[..., i].float() * cos[:, None, i].float(), other * sin[:, None, i].float()
        result[..., i] = (straight + crossed).to(x.dtype)
    return result


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit, but that a NaN is a NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def check(body: Callable[..., torch.Tensor], case: MixedCase, size: int) -> None:
    """What is done to un-rotated q and k equals what is done to rotated ones, bit by bit, in output and pages."""
    cos, sin = tables_of(case, size)
    table = case.plan()
    before = dataclasses.replace(case, q=turn(case.q, cos, sin), k=turn(case.k, cos, sin))
    plain, given = before.arguments(table), case.arguments(table)
    want, got = body(*plain), body(*given, cos, sin)
    assert got.dtype == case.q.dtype and got.is_contiguous()
    assert torch.equal(got, want)
    assert all(same(a, b) for a, b in zip(given[3:5], plain[3:5], strict=True))
    assert torch.equal(given[0], case.q) and torch.equal(given[1], case.k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "size"), [(16, 16), (24, 24), (40, 40), (64, 64), (80, 80), (256, 256), (80, 32), (64, 2), (40, 10)]
)
def test_head_dims(body: Callable, dim: int, size: int, dtype: torch.dtype) -> None:
    check(body, make_case([3, 1, 9], [30, 70, 9], AttentionShape(6, 2, dim, 24), dtype=dtype, padding=2), size)


@st.composite
def cases(draw: st.DrawFn) -> tuple[MixedCase, int]:
    q_lens = draw(st.lists(st.sampled_from([1, 1, 2, 7, 70]), min_size=1, max_size=4))
    kv_lens = [q + draw(st.sampled_from([0, 1, 15, 64])) for q in q_lens]
    kv_heads, dim = draw(st.integers(1, 3)), draw(st.integers(2, 100))
    case = make_case(
        q_lens,
        kv_lens,
        AttentionShape(kv_heads * draw(st.integers(1, 4)), kv_heads, dim, draw(st.sampled_from([dim, 16]))),
        page_size=draw(st.sampled_from([1, 16, 48])),
        dtype=draw(st.sampled_from(DTYPES)),
        padding=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 2**16)),
    )
    return case, 2 * draw(st.integers(1, dim // 2))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_shape(drawn: tuple[MixedCase, int]) -> None:
    assert cpu_backend.load()
    for each in (reference.mixed_attention, ops.mixed_attention):
        check(each, *drawn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_size_round_as_in_the_reference(dtype: torch.dtype) -> None:
    """Tiny and huge ones, zeros, infinities and NaN, in what is written to the pages."""
    assert cpu_backend.load()
    case = make_case([200], [200], AttentionShape(2, 1, 64, 16), dtype=dtype, page_size=256)
    odd = torch.tensor([0.0, -0.0, 1e-7, -3e-5, 6e4, -1e38, torch.inf, -torch.inf, torch.nan]).to(dtype)
    generator = torch.Generator().manual_seed(1)
    k = case.k * torch.exp2(torch.randint(-20, 14, case.k.shape, generator=generator)).to(dtype)
    picks = torch.randint(len(odd), case.k.shape, generator=generator)
    k = torch.where(torch.rand(case.k.shape, generator=generator) < 0.05, odd[picks], k)
    case = dataclasses.replace(case, k=k)
    pages = []
    for each in (reference.mixed_attention, ops.mixed_attention):
        given = case.arguments(case.plan())
        each(*given, *tables_of(case, 64))
        pages.append(given[3])
    assert pages[0].isnan().any() and same(*pages)


def test_rows_at_a_stride(body: Callable) -> None:
    """q, k and v as slices of one projection, cos and sin of one table; and last dimensions that are not one piece."""
    case = make_case([4, 1], [50, 70], AttentionShape(6, 2, 40, 40), dtype=torch.bfloat16)
    cos, sin = tables_of(case, 24)
    plain = case.arguments(case.plan())
    want = body(*plain, cos, sin)
    fused = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], 1)
    rows = [x.unflatten(1, (-1, 40)) for x in fused.split([6 * 40, 2 * 40, 2 * 40], 1)]
    both = torch.cat([cos, sin], 1)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (case.q, case.k, case.v)]
    tables = [x.t().contiguous().t() for x in (cos, sin)]
    for first, last in ((rows, both.split(24, 1)), (turned, tables)):
        given = case.arguments(case.plan())
        assert not any(x.is_contiguous() for x in (*first, *last))
        assert torch.equal(body(*first, *given[3:], *last), want)
        assert all(same(a, b) for a, b in zip(given[3:5], plain[3:5], strict=True))


def test_tokens_without_a_slot_write_no_key(body: Callable) -> None:
    case = make_case([4], [20], AttentionShape(4, 2, 32, 32), page_size=8)
    slots = case.metadata.slot_mapping.clone()
    slots[1] = -1
    case = dataclasses.replace(case, metadata=dataclasses.replace(case.metadata, slot_mapping=slots))
    cos, sin = tables_of(case, 32)
    given = case.arguments(case.plan())
    body(*given, cos, sin)
    want, used = case.k_pages.clone(), slots[slots >= 0]
    want[used // 8, :, used % 8] = turn(case.k, cos, sin)[slots >= 0]
    assert same(given[3], want)


def test_threads_change_nothing() -> None:
    assert cpu_backend.load()
    case = make_case([300, 1, 1], [400, 5, 9], AttentionShape(6, 2, 64, 64), dtype=torch.bfloat16, padding=3)
    torch.set_num_threads(3)
    check(ops.mixed_attention, case, 64)


def test_meta_and_defaults() -> None:
    """The operator's checks of itself, with and without cosines and sines."""
    assert cpu_backend.load()
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 16, 24))
    args = [
        x.nan_to_num() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in case.arguments(case.plan())
    ]
    torch.library.opcheck(ops.mixed_attention, (*args, *tables_of(case, 16)))
    assert torch.equal(ops.mixed_attention(*args), ops.mixed_attention(*args, None, None))


def bad(cos: torch.Tensor, sin: torch.Tensor) -> dict[str, tuple[object, object, type[Exception]]]:
    wide = torch.cat([cos, cos], 1)
    return {
        "no sin": (cos, None, ValueError),
        "no cos": (None, sin, ValueError),
        "dtype of cos": (cos.double(), sin, TypeError),
        "dtype of sin": (cos, sin.bfloat16(), TypeError),
        "too few rows": (cos[1:], sin[1:], ValueError),
        "too many rows": (torch.cat([cos, cos[:1]]), torch.cat([sin, sin[:1]]), ValueError),
        "other rows": (cos, sin[1:], ValueError),
        "other columns": (cos, sin[:, :16], ValueError),
        "odd": (cos[:, :31], sin[:, :31], ValueError),
        "none": (cos[:, :0], sin[:, :0], ValueError),
        "wider than a head": (wide, wide, ValueError),
        "three dimensions": (cos[None], sin[None], ValueError),
        "one row": (cos[:1], sin[:1], ValueError),
    }


@pytest.mark.parametrize("name", bad(torch.zeros(2, 32), torch.zeros(2, 32)))
def test_what_does_not_fit_is_refused_before_anything_is_written(body: Callable, name: str) -> None:
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 32, 32))
    cos, sin, error = bad(*tables_of(case, 32))[name]
    given = case.arguments(case.plan())
    with pytest.raises(error, match="cos"):
        body(*given, cos, sin)
    assert same(given[3], case.k_pages) and same(given[4], case.v_pages)


def test_the_triton_body_refuses() -> None:
    case = make_case([4], [20], AttentionShape(4, 2, 32, 32))
    with pytest.raises(NotImplementedError, match="rotates nothing"):
        triton_attention.mixed_attention(*case.arguments(case.plan()), *tables_of(case, 32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_code_rounds_as_often(dtype: torch.dtype) -> None:
    """What Inductor makes of the model's own rotation is what the operator means: it rounds once."""

    def rotation(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    case = make_case([9], [9], AttentionShape(3, 1, 40, 40), dtype=dtype)
    cos, sin = tables_of(case, 40)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(rotation)(case.q, cos, sin), reference.rotated(case.q, cos, sin))
