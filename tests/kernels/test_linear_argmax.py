"""``chunkc::linear_argmax`` against the argmax of the sums that ``chunkc::packed_linear`` gives: bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.kernels import linear_argmax
from chunkc.kernels.packed_linear import PackedWeight, can_pack

from .test_packed_linear import BODIES, DTYPES, ROWS, SIZES

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
operator = torch.ops.chunkc.linear_argmax
NAN, INF = math.nan, math.inf


def check(x, packed, columns, bias=None, norm=None, eps=1e-5):
    """The operator, and the body that says what it means, give the first of the largest sums."""
    found, values = operator(x, packed.handle, bias, columns, norm, eps)
    sums = linear_argmax.linear_rows(x, packed.handle, bias, columns, norm, eps)
    assert found.dtype is torch.int64 and values.dtype is torch.float32
    assert found.shape == values.shape == x.shape[:-1]
    for row, column, value in zip(
        sums.reshape(-1, columns), found.reshape(-1).tolist(), values.reshape(-1).tolist(), strict=True
    ):
        if row.isnan().any():
            assert math.isnan(value) and row[column].isnan()
        else:
            assert value == row.max() and column == (row == row.max()).nonzero()[0]


@BODIES
@given(
    rows=ROWS,
    columns=st.one_of(SIZES, st.integers(1, 600)),
    in_features=SIZES,
    with_bias=st.booleans(),
    with_norm=st.booleans(),
    layout=st.sampled_from(["[M, K]", "[1, M, K]", "rows apart"]),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2, 3]),
    special=st.sampled_from([None, NAN, INF, -INF]),
    seed=st.integers(0, 99),
)
def test_the_first_of_the_largest_sums(
    own, rows, columns, in_features, with_bias, with_norm, layout, dtype, threads, special, seed
):
    torch.manual_seed(seed)
    # few different numbers: sums are equal often
    weight = torch.randint(-1, 2, (columns, in_features)).to(dtype)
    x = torch.randint(-1, 2, (rows, in_features)).to(dtype)
    bias = torch.randint(-1, 2, (columns,)).to(dtype) if with_bias else None
    if special is not None and bias is not None:
        bias[seed % columns] = special
    if layout == "[1, M, K]":
        x = x[None]
    elif layout == "rows apart":
        x = torch.cat([x, torch.full_like(x, NAN)], dim=-1)[:, :in_features]
    norm = torch.randint(1, 3, (in_features,)).to(dtype) if with_norm and dtype is torch.float32 else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(x, PackedWeight(weight, own=own), columns, bias, norm)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_over_many_panels_and_blocks(dtype):
    """Every row's largest is in another place, first and last columns among them, and there is one more of it later."""
    rows, columns, in_features = 300, 5000, 40
    weight = torch.zeros(columns, in_features, dtype=dtype)
    x = torch.zeros(rows, in_features, dtype=dtype)
    places = torch.arange(rows) * (columns - 1) // (rows - 1)
    x[:, 0] = 1
    weight[:, 0] = -1
    packed = PackedWeight(weight)
    check(x, packed, columns)
    for row in (0, 1, 150, 298, 299):
        one = weight.clone()
        one[places[row], 0] = 2
        one[-1, 0] = 2
        packed = PackedWeight(one)
        found, _ = operator(x[row : row + 1], packed.handle, None, columns, None, 0.0)
        assert found.item() == places[row]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_no_other(dtype):
    weight, x = torch.randn(700, 96).to(dtype), torch.randn(40, 96).to(dtype)
    packed = PackedWeight(weight)
    together = operator(x, packed.handle, None, 700, None, 0.0)
    for row in range(len(x)):
        alone = operator(x[row : row + 1], packed.handle, None, 700, None, 0.0)
        assert alone[0] == together[0][row] and alone[1] == together[1][row]


def test_no_rows():
    packed = PackedWeight(torch.randn(20, 8))
    found, values = operator(torch.empty(0, 8), packed.handle, None, 20, None, 0.0)
    assert found.shape == values.shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 7)}, "does not fit a weight"),
        ({"x": torch.randn(2, 8, dtype=torch.float64)}, "must have the weight's dtype"),
        ({"out_features": 19}, "19 columns"),
        ({"norm_weight": torch.ones(7)}, r"must be \[K\]"),
        ({"norm_weight": torch.ones(8, dtype=torch.bfloat16)}, "dtype"),
        ({"bias": torch.ones(19)}, "bias"),
        ({"handle": torch.tensor([987654])}, "never the handle"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    packed = PackedWeight(torch.randn(20, 8))
    operands = {
        "x": torch.randn(2, 8),
        "handle": packed.handle,
        "bias": None,
        "out_features": 20,
        "norm_weight": None,
        "norm_eps": 0.0,
    }
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        operator(*{**operands, **change}.values())


def test_a_gated_weight_is_refused():
    packed = PackedWeight(torch.randn(32, 8), gated=True)
    with pytest.raises((RuntimeError, ValueError), match="gated"):
        operator(torch.randn(2, 8), packed.handle, None, 32, None, 0.0)


def test_the_shapes_that_a_compiler_sees():
    x = torch.empty(2, 3, 8, device="meta")
    found, values = operator(x, torch.empty(1, dtype=torch.int64, device="meta"), None, 20, None, 0.0)
    assert found.shape == values.shape == (2, 3)
    assert (found.dtype, values.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_body_that_says_what_it_means(dtype, monkeypatch):
    """It serves where there is no compiler; here it multiplies by the packed weights of the library."""
    for name in ("packed_linear", "fused_linear"):
        monkeypatch.setattr(linear_argmax, name, getattr(torch.ops.chunkc, name))
    packed, x = PackedWeight(torch.randn(50, 24).to(dtype)), torch.randn(5, 24).to(dtype)
    expected = operator(x, packed.handle, None, 50, None, 0.0)
    found = linear_argmax.linear_argmax(x, packed.handle, None, 50, None, 0.0)
    assert all(map(torch.equal, found, expected))
