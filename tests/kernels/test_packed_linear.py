"""``chunkc::packed_linear`` against ``torch.nn.functional.linear``."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chunkc.kernels.packed_linear import PackedWeight, can_pack

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
packed_linear = torch.ops.chunkc.packed_linear


@needs_packing
@given(
    rows=st.integers(1, 70),
    out_features=st.integers(1, 130),
    in_features=st.integers(1, 130),
    bias=st.booleans(),
    leading=st.booleans(),
    dtype=st.sampled_from([d for d in (torch.float32, torch.bfloat16) if can_pack(d)]),
    seed=st.integers(0, 2**31),
)
def test_equals_linear(rows, out_features, in_features, bias, leading, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_features, generator=generator).to(dtype)
    x = x[None] if leading else x
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    b = torch.randn(out_features, generator=generator).to(dtype) if bias else None
    packed = PackedWeight(weight)
    result = packed_linear(x, packed.handle, b, out_features)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if b is None else b.double())
    assert result.shape == exact.shape and result.dtype == dtype
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(result.double(), exact, rtol=tolerance, atol=tolerance * in_features**0.5)


@needs_packing
def test_reads_rows_of_a_wider_tensor():
    wide = torch.randn(5, 30)
    weight = torch.randn(7, 10)
    packed = PackedWeight(weight)
    torch.testing.assert_close(packed_linear(wide[:, 10:20], packed.handle, None, 7), wide[:, 10:20] @ weight.T)


@needs_packing
def test_handles_tell_weights_apart():
    first, second = torch.randn(4, 3), torch.randn(4, 3)
    one, two = PackedWeight(first), PackedWeight(second)
    x = torch.randn(2, 3)
    torch.testing.assert_close(packed_linear(x, two.handle, None, 4), x @ second.T)
    torch.testing.assert_close(packed_linear(x, one.handle, None, 4), x @ first.T)


@needs_packing
def test_a_weight_that_is_gone_is_an_error_and_not_another_weight():
    packed = PackedWeight(torch.randn(4, 3))
    handle, alive = packed.handle.clone(), weakref.ref(packed)
    del packed
    gc.collect()
    assert alive() is None
    PackedWeight(torch.randn(4, 3))
    with pytest.raises(RuntimeError, match="is gone"):
        packed_linear(torch.randn(2, 3), handle, None, 4)


@needs_packing
def test_opcheck():
    packed = PackedWeight(torch.randn(6, 5))
    torch.library.opcheck(torch.ops.chunkc.packed_linear.default, (torch.randn(3, 5), packed.handle, None, 6))
