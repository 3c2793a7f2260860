"""Each dtype has libraries of its own: what is not asked for is not built, and several serve beside each other."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from chunkc import serving
from chunkc.kernels import cpu_backend
from chunkc.kernels.packed_linear import PackedWeight, can_pack

ONE_AFTER_THE_OTHER = """
import torch
from chunkc.kernels import cpu_backend
from chunkc.kernels.cases import make_case
from chunkc.kernels.native import NativeLibrary
from chunkc.kernels.tasks import AttentionShape
asked = []
find_or_build = NativeLibrary.find_or_build
NativeLibrary.find_or_build = lambda library: (asked.append(library.name), find_or_build(library))[1]
first, *others = [torch.float32, torch.bfloat16, torch.float16][int(__import__("sys").argv[1]):]
if not others:
    others = [torch.float32]
name = lambda dtype: str(dtype).removeprefix("torch.")
cases = {d: make_case([3, 30], [40, 90], AttentionShape(4, 2, 16, 16), dtype=d) for d in (first, *others)}
assert cpu_backend.load(first) and cpu_backend.active_body() == "cpp"
want = cases[first].run()
assert [n for n in asked if "attention" in n] == ["cpu_attention_" + name(first)], asked
for other in others:
    pages = cases[other].arguments(cases[other].plan())[3]
    before = pages.clone()
    try:
        cases[other].run()
    except RuntimeError as error:
        assert f"nothing is loaded for {name(other)}: call chunkc.kernels.cpu_backend.load" in str(error), error
    else:
        raise AssertionError(other)
    assert torch.equal(pages.view(torch.int16), before.view(torch.int16))
    assert cpu_backend.load(other)
    torch.testing.assert_close(cases[other].run().float(), cases[first].run().float(), atol=3e-2, rtol=3e-2)
assert torch.equal(cases[first].run(), want)
"""


@pytest.mark.parametrize("first", range(3), ids=["float32", "bfloat16", "float16"])
def test_attention_is_for_what_was_loaded_and_says_so(first: int) -> None:
    command = [sys.executable, "-c", ONE_AFTER_THE_OTHER, str(first)]
    result = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_attention_of_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="float64"):
        cpu_backend.load(torch.float64)


def test_a_start_loads_what_its_layers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = []
    monkeypatch.setattr(cpu_backend, "load", loaded.append)
    layers = [SimpleNamespace(dtype=dtype) for dtype in (torch.float16, torch.float32, torch.float16)]
    serving.load_attention(SimpleNamespace(layers=layers))
    assert sorted(map(str, loaded)) == ["torch.float16", "torch.float32"]


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="no packed kernel for bfloat16 on this machine")
@pytest.mark.parametrize("own", [True, False], ids=["own", "onednn"])
def test_weights_of_two_dtypes_in_turns(own: bool) -> None:
    """Handles tell the libraries apart, whatever the other arguments are."""
    dtypes = (torch.float32, torch.bfloat16) * 3
    weights = [torch.randn(16, 24).to(dtype) for dtype in dtypes]
    packed = [PackedWeight(weight, own=own) for weight in weights]
    assert len({int(one.handle) for one in packed}) == len(packed)
    x = torch.randn(5, 24)
    for one, weight, dtype in zip(packed, weights, dtypes, strict=True):
        result = torch.ops.chunkc.packed_linear(x.to(dtype), one.handle, None, 16)
        torch.testing.assert_close(
            result.float(), x @ weight.float().T, atol=0.1 if dtype == torch.bfloat16 else 1e-4, rtol=0.02
        )
        assert torch.equal(torch.ops.chunkc.packed_rows(torch.tensor([[7]]), one.handle, 24, dtype)[0], weight[7:8])
        other = torch.bfloat16 if dtype == torch.float32 else torch.float32
        with pytest.raises(TypeError, match="must have the weight's dtype"):
            torch.ops.chunkc.packed_linear(x.to(other), one.handle, None, 16)
        with pytest.raises(ValueError, match="packed_rows"):
            torch.ops.chunkc.packed_rows(torch.tensor([7]), one.handle, 24, other)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
@pytest.mark.parametrize("own", [True, False], ids=["own", "onednn"])
def test_rows_at_any_distance(own: bool) -> None:
    """What is one distance is read as it lies, and what is not is laid out anew."""
    weight = torch.randn(16, 6)
    packed = PackedWeight(weight, own=own)
    base = torch.randn(4, 5, 12)
    for x in (
        base[..., :6],
        base[..., ::2],
        base[:, ::2, 3:9],
        base[:, 1:3, :6],
        base[::2, :, 6:],
        base[:, :1, :6],
        base[1:1, :, :6],
        base[0, 0, :6],
        base[0, 0, ::2],
        base[:1, 0, :6].expand(4, 6),
        base[..., :6].transpose(0, 1),
        torch.randn(6, 7).T,
    ):
        result = torch.ops.chunkc.packed_linear(x, packed.handle, None, 16)
        torch.testing.assert_close(result, x @ weight.T)
