"""``chunkc::packed_linear`` against the product in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.kernels.packed_linear import PackedWeight, active_body, can_pack

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
packed_linear, packed_rows = torch.ops.chunkc.packed_linear, torch.ops.chunkc.packed_rows

DTYPES = [d for d in (torch.float32, torch.bfloat16) if can_pack(d)]
BODIES = pytest.mark.parametrize("own", [True, False], ids=["own", "onednn"])
#: panels of the packed weight are 48 wide, vectors 16; tiles have 8 rows, blocks 128
SIZES = st.one_of(st.integers(1, 130), st.sampled_from([15, 16, 17, 47, 48, 49, 96, 97, 144, 255]))
ROWS = st.one_of(st.integers(0, 40), st.sampled_from([127, 128, 129, 260]))


def check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    result: torch.Tensor,
    dtype: torch.dtype | None = None,
    precision: torch.dtype | None = None,
) -> None:
    """Each element is as near to the exact one as its sum of products, of which each is rounded, lets it be.

    The result is of ``dtype`` and rounded to ``precision``, both x's where not given.
    """
    dtype, precision = dtype or x.dtype, precision or x.dtype
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = torch.nn.functional.linear(x.double().abs(), weight.double().abs())
    if bias is not None:
        terms += bias.double().abs()
    assert result.shape == exact.shape and result.dtype == dtype and result.is_contiguous()
    bound = terms * 2.0**-24 * (x.shape[-1] + 2) + exact.abs() * torch.finfo(precision).eps
    assert ((result.double() - exact).abs() <= bound + 1e-30).all()


@BODIES
@given(
    rows=ROWS,
    out_features=SIZES,
    in_features=SIZES,
    with_bias=st.booleans(),
    layout=st.sampled_from(["[M, K]", "[K]", "[1, M, K]", "rows apart", "columns apart", "transposed", "[M, 2, K]"]),
    weight_is_transposed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    wide=st.booleans(),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_product(
    own, rows, out_features, in_features, with_bias, layout, weight_is_transposed, dtype, wide, threads, seed
):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x = {
        "[M, K]": lambda: randn(rows, in_features),
        "[K]": lambda: randn(in_features),
        "[1, M, K]": lambda: randn(1, rows, in_features),
        # what lies between must not get into the result
        "rows apart": lambda: torch.where(
            torch.arange(in_features + 5) < in_features, randn(rows, in_features + 5), float("nan")
        )[:, :in_features],
        "columns apart": lambda: randn(rows, in_features, 2)[..., 1],
        "transposed": lambda: randn(in_features, rows).t(),
        "[M, 2, K]": lambda: randn(2, rows, in_features).transpose(0, 1),
    }[layout]()
    weight = randn(in_features, out_features).t() if weight_is_transposed else randn(out_features, in_features)
    bias = randn(out_features) if with_bias else None
    torch.set_num_threads(threads)
    packed = PackedWeight(weight, own=own)
    if wide:  # not rounded where the sums are ours
        precision = torch.float32 if own and active_body(dtype) == "own" else dtype
        result = packed_linear(x, packed.handle, bias, out_features, torch.float32)
        check(x, weight, bias, result, torch.float32, precision)
    else:
        check(x, weight, bias, packed_linear(x, packed.handle, bias, out_features))


@BODIES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 9, 130])
def test_more_steps_than_a_chunk_holds(own, dtype, threads, rows):
    torch.set_num_threads(threads)
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((rows, 9001), (70, 9001), (70,)))
    packed = PackedWeight(weight, own=own)
    check(x, weight, bias, packed_linear(x, packed.handle, bias, 70))
    precision = torch.float32 if own and active_body(dtype) == "own" else dtype
    check(x, weight, bias, packed_linear(x, packed.handle, bias, 70, torch.float32), torch.float32, precision)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_features", [129, 9001])
def test_a_row_does_not_depend_on_the_batch(dtype, in_features):
    """Bit for bit, so that greedy tokens do not change with what a request is batched with."""
    if active_body(dtype) != "own":
        pytest.skip("oneDNN does not promise it")
    x, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((300, in_features), (200, in_features), (200,)))
    packed = PackedWeight(weight)
    whole = packed_linear(x, packed.handle, bias, 200)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (*range(1, 20), 127, 128, 129, 300):
            first = 300 - rows
            assert torch.equal(packed_linear(x[first:], packed.handle, bias, 200), whole[first:]), (rows, threads)


def test_infinities_and_nans_stay_in_their_row_and_column():
    for dtype in DTYPES:
        x, weight = torch.randn(11, 33).to(dtype), torch.randn(50, 33).to(dtype)
        x[3, 32], x[8, 0], weight[49, 32] = float("inf"), float("nan"), float("nan")
        packed = PackedWeight(weight)
        result = packed_linear(x, packed.handle, None, 50)
        expected = torch.ones(11, 50, dtype=torch.bool)
        expected[[3, 8]] = expected[:, 49] = False
        assert torch.equal(result.isfinite(), expected)


def test_handles_tell_weights_apart():
    weights = [torch.randn(4, 3) for _ in range(3)]
    packed = [PackedWeight(weight) for weight in weights]
    x = torch.randn(2, 3)
    for one, weight in reversed(list(zip(packed, weights, strict=True))):
        check(x, weight, None, packed_linear(x, one.handle, None, 4))


@pytest.mark.parametrize(
    ("x", "bias", "out_features", "error"),
    [
        (torch.zeros(2, 4), None, 6, ValueError),
        (torch.zeros(()), None, 6, ValueError),
        (torch.zeros(2, 5), None, 7, ValueError),
        (torch.zeros(2, 5), torch.zeros(1), 6, ValueError),
        (torch.zeros(2, 5), torch.zeros(6, dtype=torch.float64), 6, TypeError),
        (torch.zeros(2, 5, dtype=torch.bfloat16), None, 6, TypeError),
    ],
)
def test_what_does_not_fit_is_an_error(x, bias, out_features, error):
    packed = PackedWeight(torch.randn(6, 5))
    with pytest.raises(error, match="packed_linear"):
        packed_linear(x, packed.handle, bias, out_features)


def test_a_result_is_of_its_inputs_dtype_or_float32():
    packed = PackedWeight(torch.randn(6, 5))
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        with pytest.raises(TypeError, match="packed_linear: results are"):
            packed_linear(torch.zeros(2, 5), packed.handle, None, 6, dtype)


def test_what_is_no_handle_is_an_error():
    for number in (-1, 10**6, 2**40):
        with pytest.raises(RuntimeError, match="never the handle"):
            packed_linear(torch.zeros(2, 5), torch.tensor([number]), None, 6)
    with pytest.raises(TypeError, match="one int64"):
        packed_linear(torch.zeros(2, 5), torch.tensor([1.0]), None, 6)


@BODIES
def test_opcheck(own):
    packed = PackedWeight(torch.randn(6, 5), own=own)
    arguments = (torch.randn(3, 5), packed.handle, None, 6)
    for more in ((), (torch.float32,)):
        torch.library.opcheck(torch.ops.chunkc.packed_linear.default, (*arguments, *more))


@BODIES
@given(out_features=SIZES, in_features=SIZES, dtype=st.sampled_from(DTYPES), consumed=st.booleans())
def test_rows_are_read_back_as_they_were(own, out_features, in_features, dtype, consumed):
    weight = torch.randn(out_features, in_features).to(dtype)
    packed = PackedWeight(weight.clone(), own=own, consumed=consumed)
    numbers = torch.randint(out_features, (3, 5))
    for which in (numbers, numbers.int(), numbers.t(), numbers[:0]):
        assert torch.equal(packed_rows(which, packed.handle, in_features, dtype), weight[which.long()])


@BODIES
@pytest.mark.parametrize("number", [1.7, True, 1j], ids=str)
def test_rows_are_named_by_integers(own, number):
    """What is none is refused, not rounded."""
    packed = PackedWeight(torch.randn(16, 5), own=own)
    with pytest.raises(TypeError, match="packed_rows: rows are named by int64 or int32"):
        packed_rows(torch.tensor([number]), packed.handle, 5, torch.float32)


def test_a_weight_that_is_consumed_is_packed_right_and_only_its_own_memory_goes():
    whole = torch.randn(1500, 700)
    weight, before = whole[200:1300], whole.clone()
    packed = PackedWeight(weight, consumed=True)
    assert torch.equal(packed_rows(torch.arange(1100), packed.handle, 700, torch.float32), before[200:1300])
    assert torch.equal(whole[:200], before[:200]) and torch.equal(whole[1300:], before[1300:])


@BODIES
def test_rows_that_are_not_there_are_errors(own):
    packed = PackedWeight(torch.randn(6, 5), own=own)
    for number in (-1, 6):
        with pytest.raises(IndexError):
            packed_rows(torch.tensor([number]), packed.handle, 5, torch.float32)
    torch.library.opcheck(torch.ops.chunkc.packed_rows.default, (torch.tensor([2]), packed.handle, 5, torch.float32))
