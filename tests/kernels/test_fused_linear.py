"""``chunkc::fused_linear`` against its parts: the plain product in float32, and everything else in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.kernels.fused_linear import TURN, Activation
from chunkc.kernels.packed_linear import PackedWeight, active_body, can_pack

from .test_packed_linear import BODIES, DTYPES, ROWS, SIZES

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
fused_linear, packed_linear = torch.ops.chunkc.fused_linear, torch.ops.chunkc.packed_linear

#: a panel holds 24 gates
GATES = st.one_of(st.integers(1, 17), st.sampled_from([3, 6, 18, 25])).map(lambda turns: turns * TURN)
GATED = (Activation.SILU, Activation.GELU_TANH)
EPS = 1e-5


def normalised(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """Llama's RMSNorm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def exponent(activation: Activation, gates: torch.Tensor) -> torch.Tensor:
    """Both activations are the gates times the sigmoid of this."""
    return gates if activation is Activation.SILU else 2 * (2 / torch.pi) ** 0.5 * (gates + 0.044715 * gates**3)


def sums_of(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, own: bool) -> torch.Tensor:
    """The product as it is summed, before anything is rounded."""
    packed = PackedWeight(weight, own=own)
    return packed_linear(x, packed.handle, bias, weight.shape[0], torch.float32)


def poison(numel: int, dtype: torch.dtype) -> None:
    """Leave NaN in memory that the next result of this size may get."""
    torch.full((numel,), float("nan"), dtype=dtype)


@BODIES
@given(
    rows=ROWS,
    columns=SIZES,
    in_features=SIZES,
    with_bias=st.booleans(),
    layout=st.sampled_from(["[M, K]", "[1, M, K]", "rows apart", "transposed"]),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**31),
)
def test_a_residual_is_added_to_the_sums(own, rows, columns, in_features, with_bias, layout, dtype, threads, seed):
    """In float32, where kernels of ours sum, and rounded once."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, residual = randn(rows, in_features), randn(columns, in_features), randn(rows, columns) * 100
    if layout == "[1, M, K]":
        x, residual = x[None], residual[None]
    elif layout == "rows apart":
        x, residual = randn(rows, in_features + 3)[:, 3:], randn(rows, 2 * columns)[:, columns:]
    elif layout == "transposed":
        x, residual = randn(in_features, rows).t(), randn(columns, rows).t()
    bias = randn(columns) if with_bias else None
    torch.set_num_threads(threads)
    sums = sums_of(x, weight, bias, own)
    packed = PackedWeight(weight, own=own)
    poison(sums.numel(), dtype)
    result = fused_linear(x, packed.handle, bias, columns, None, 0.0, Activation.NONE, residual)
    assert result.dtype == dtype and result.is_contiguous()
    assert torch.equal(result, (sums + residual.float()).to(dtype))


@BODIES
@given(
    rows=ROWS,
    columns=GATES,
    in_features=SIZES,
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    activation=st.sampled_from(GATED),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 2**31),
)
def test_gates_let_through_what_is_beside_them(
    own, rows, columns, in_features, with_bias, with_residual, activation, dtype, threads, seed
):
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight = randn(rows, in_features), randn(2 * columns, in_features)
    bias = randn(2 * columns) if with_bias else None
    residual = randn(rows, columns) if with_residual else None
    torch.set_num_threads(threads)
    gates, rest = sums_of(x, weight, bias, own).double().chunk(2, dim=-1)
    packed = PackedWeight(weight, own=own, gated=True)
    poison(rows * columns, dtype)
    result = fused_linear(x, packed.handle, bias, columns, None, 0.0, activation, residual)
    assert result.shape == (rows, columns) and result.dtype == dtype and result.is_contiguous()
    power = exponent(activation, gates)
    product = gates * torch.sigmoid(power) * rest
    exact = product if residual is None else product + residual.double()
    # the exponential of a rounded number of size p is off by p times the rounding
    allowed = 2.0**-22 * (product.abs() * (1 + power.abs()) + exact.abs()) + exact.abs() * torch.finfo(dtype).eps
    assert ((result.double() - exact).abs() <= allowed + 1e-30).all()


def one_ulp_apart(a: torch.Tensor, b: torch.Tensor, ulps: float) -> bool:
    return bool(((a.double() - b.double()).abs() <= ulps * torch.finfo(a.dtype).eps * b.double().abs()).all())


@BODIES
@given(
    rows=st.integers(1, 40),
    size=st.one_of(st.integers(1, 130), st.sampled_from([576, 1023, 1024])),
    apart=st.booleans(),
    scale=st.sampled_from([1e-4, 1.0, 3e3]),
    dtype=st.sampled_from(DTYPES),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_the_norm_is_the_models(own, rows, size, apart, scale, dtype, threads, seed):
    """A weight that is the identity shows what is multiplied."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, size + 5 * apart, generator=generator) * scale).to(dtype)[:, 5 * apart :]
    norm_weight = torch.randn(size, generator=generator).to(dtype)
    torch.set_num_threads(threads)
    packed = PackedWeight(torch.eye(size, dtype=dtype), own=own)
    poison(x.numel(), dtype)
    result = fused_linear(x, packed.handle, None, size, norm_weight, EPS, Activation.NONE, None)
    expected = normalised(x, norm_weight)
    assert one_ulp_apart(result, expected, 8 if dtype is torch.float32 else 2)
    if dtype is not torch.float32:  # a sum in another order rounds a number now and then to its neighbour
        assert (result != expected).sum() <= 1 + 0.03 * result.numel()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [1, 8, 130, 300])
def test_all_of_it_is_its_parts_one_after_the_other(dtype, threads, rows):
    """Bit for bit, with deep weights whose sums are taken in chunks."""
    if active_body(dtype) != "own":
        pytest.skip("oneDNN rounds in between")
    torch.set_num_threads(threads)
    depth = 5000
    x, weight, norm_weight = torch.randn(rows, depth), torch.randn(96, depth), torch.randn(depth)
    x, weight, norm_weight = (tensor.to(dtype) for tensor in (x, weight, norm_weight))
    residual = torch.randn(rows, 48).to(dtype)
    gated = PackedWeight(weight, gated=True)
    whole = fused_linear(x, gated.handle, None, 48, norm_weight, EPS, Activation.SILU, residual)
    identity = PackedWeight(torch.eye(depth, dtype=dtype))
    multiplied = fused_linear(x, identity.handle, None, depth, norm_weight, EPS, Activation.NONE, None)
    assert torch.equal(whole, fused_linear(multiplied, gated.handle, None, 48, None, 0.0, Activation.SILU, residual))
    plain = fused_linear(multiplied, gated.handle, None, 48, None, 0.0, Activation.SILU, None)
    assert one_ulp_apart(whole, plain + residual, 3) or dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_batch(dtype):
    if active_body(dtype) != "own":
        pytest.skip("oneDNN does not promise it")
    x, norm_weight, weight = torch.randn(300, 577), torch.randn(577), torch.randn(208, 577)
    x, norm_weight, weight = (tensor.to(dtype) for tensor in (x, norm_weight, weight))
    residual = torch.randn(300, 104).to(dtype)
    packed = PackedWeight(weight, gated=True)

    def run(first: int) -> torch.Tensor:
        operands = (x[first:], packed.handle, None, 104, norm_weight, EPS)
        return fused_linear(*operands, Activation.SILU, residual[first:])

    whole = run(0)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (*range(1, 20), 127, 128, 129, 300):
            assert torch.equal(run(300 - rows), whole[300 - rows :]), (rows, threads)


@pytest.mark.parametrize("activation", GATED)
def test_the_reference_is_torchs_activation(activation):
    gates = torch.linspace(-9, 9, 400, dtype=torch.float64)
    torch.testing.assert_close(activation(gates), gates * torch.sigmoid(exponent(activation, gates)))


def test_a_weight_without_columns_has_a_norm_too():
    """Of nothing: the process survives, and the result is the residual."""
    if active_body(torch.float32) != "own":
        pytest.skip("oneDNN has no such product")
    packed, residual = PackedWeight(torch.randn(16, 0)), torch.randn(3, 16)
    result = fused_linear(torch.zeros(3, 0), packed.handle, None, 16, torch.ones(0), EPS, Activation.NONE, residual)
    assert torch.equal(result, residual)


def test_large_gates_saturate_and_nan_stays_in_its_row():
    for dtype in DTYPES:
        x = torch.zeros(5, 2).to(dtype)
        x[:, 0] = torch.tensor([1e4, -1e4, float("nan"), 0.0, 3.0])
        x[:, 1] = 1
        weight = torch.zeros(16, 2, dtype=dtype)
        weight[:8, 0], weight[8:, 1] = 1, 2
        packed = PackedWeight(weight, gated=True)
        for activation in GATED:
            result = fused_linear(x, packed.handle, None, 8, None, 0.0, activation, None).float()
            assert result[0].eq(2 * x[0, 0].float()).all() and result[1].eq(0).all()
            assert result[2].isnan().all() and result[3:].isfinite().all()


@BODIES
@given(columns=GATES, in_features=SIZES, dtype=st.sampled_from(DTYPES), consumed=st.booleans())
def test_rows_of_a_gated_weight_are_read_back_as_they_were(own, columns, in_features, dtype, consumed):
    weight = torch.randn(2 * columns, in_features).to(dtype)
    packed = PackedWeight(weight.clone(), own=own, consumed=consumed, gated=True)
    numbers = torch.arange(2 * columns)
    assert torch.equal(torch.ops.chunkc.packed_rows(numbers, packed.handle, in_features, dtype), weight)


def test_a_gated_weight_that_is_consumed_is_packed_right_and_only_its_own_memory_goes():
    whole = torch.randn(5000, 700)
    weight, before = whole[200:4840], whole.clone()
    packed = PackedWeight(weight, consumed=True, gated=True)
    rows = torch.ops.chunkc.packed_rows(torch.arange(4640), packed.handle, 700, torch.float32)
    assert torch.equal(rows, before[200:4840])
    assert torch.equal(whole[:200], before[:200]) and torch.equal(whole[4840:], before[4840:])


@BODIES
def test_what_does_not_fit_is_an_error(own):
    plain, gated = PackedWeight(torch.randn(16, 5), own=own), PackedWeight(torch.randn(16, 5), own=own, gated=True)
    x, none = torch.zeros(2, 5), (None, 0.0, Activation.NONE, None)
    wrong = [
        (ValueError, (x, plain.handle, None, 15, *none)),
        (ValueError, (torch.zeros(2, 4), plain.handle, None, 16, *none)),
        (ValueError, (x, plain.handle, torch.zeros(8), 16, *none)),
        (ValueError, (x, plain.handle, None, 8, None, 0.0, Activation.SILU, None)),
        (ValueError, (x, gated.handle, None, 16, *none)),
        (ValueError, (x, gated.handle, None, 16, None, 0.0, Activation.SILU, None)),
        (ValueError, (x, plain.handle, None, 16, None, 0.0, 3, None)),
        (ValueError, (x, plain.handle, None, 16, torch.zeros(16), EPS, Activation.NONE, None)),
        (TypeError, (x, plain.handle, None, 16, torch.zeros(5).bfloat16(), EPS, Activation.NONE, None)),
        (ValueError, (x, plain.handle, None, 16, None, 0.0, Activation.NONE, torch.zeros(16))),
        (ValueError, (x, plain.handle, None, 16, None, 0.0, Activation.NONE, torch.zeros(1, 16))),
        (TypeError, (x, plain.handle, None, 16, None, 0.0, Activation.NONE, torch.zeros(2, 16).bfloat16())),
    ]
    for error, arguments in wrong:
        with pytest.raises(error, match="fused_linear"):
            fused_linear(*arguments)
    with pytest.raises(ValueError, match="do not fit a gated weight"):
        packed_linear(x, gated.handle, None, 16)
    for rows in (15, 24):
        with pytest.raises(ValueError, match="half the rows of a gated weight"):
            PackedWeight(torch.randn(rows, 5), own=own, gated=True)


@BODIES
def test_opcheck(own):
    plain, gated = PackedWeight(torch.randn(16, 5), own=own), PackedWeight(torch.randn(16, 5), own=own, gated=True)
    x, norm_weight = torch.randn(3, 5), torch.randn(5)
    for arguments in (
        (x, plain.handle, None, 16, None, 0.0, 0, torch.randn(3, 16)),
        (x[None], gated.handle, torch.randn(16), 8, norm_weight, EPS, 1, None),
    ):
        torch.library.opcheck(torch.ops.chunkc.fused_linear.default, arguments)


WITHOUT_COMPILER = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from chunkc.kernels import packed_linear
from chunkc.kernels.fused_linear import Activation
from chunkc.kernels.packed_linear import PackedWeight
assert packed_linear.load(torch.float32) is None
x, weight, bias, norm, residual = (torch.randn(*s) for s in ((3, 5), (16, 5), (16,), (5,), (3, 8)))
packed = PackedWeight(weight, gated=True)
result = torch.ops.chunkc.fused_linear(x, packed.handle, bias, 8, norm, 1e-5, Activation.SILU, residual)
scaled = torch.nn.functional.rms_norm(x, (5,), norm, 1e-5)
gates, rest = (scaled @ weight.T + bias).chunk(2, -1)
torch.testing.assert_close(result, torch.nn.functional.silu(gates) * rest + residual)
print("right")
"""


def test_without_a_compiler_the_reference_serves(tmp_path: Path) -> None:
    environment = {**os.environ, "CHUNKC_CACHE_DIR": str(tmp_path), "CXX": "no-such-compiler"}
    command = [sys.executable, "-c", WITHOUT_COMPILER, str(Path(__file__).parent)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout == "right\n", result.stderr
