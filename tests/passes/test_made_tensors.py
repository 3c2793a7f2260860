"""made_tensors: made when the passes are done, of tensors that go as soon as they are not needed."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

import chunkc.passes.made_tensors as made_tensors
from chunkc.kernels.packed_linear import can_pack
from chunkc.passes.attributes import attribute, set_attribute
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.made_tensors import Concatenated, Packed, make, make_all
from chunkc.rewriting import rewrite

from .test_pack_linears import Small

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
MADE = {
    "both": Concatenated(("a", "b")),
    "packed": Packed("both", transposed=False),
    "packed_c": Packed("c", transposed=True),
}


def originals() -> dict[str, torch.Tensor]:
    return {name: torch.full((3, 40), float(number)) for number, name in enumerate("abcd", 1)}


@needs_packing
@pytest.mark.parametrize("tied", [False, True])
def test_what_was_deferred_is_the_same_when_it_is_made(tied):
    model, ids = Small(tied).eval(), torch.randint(40, (9,))
    done = rewrite(model, deferred=True)
    graph_module, context = done.graph_module, done.context
    assert context.made and all(isinstance(attribute(graph_module, name), FakeTensor) for name in context.made)
    assert not context.resources
    assert isinstance(run_on_prompt(graph_module, ids), FakeTensor)  # no numbers rather than wrong ones
    for name in context.made:
        set_attribute(graph_module, name, make(name, context.made, context.ingredients.__getitem__, context.resources))
    with torch.no_grad():
        expected = model(ids[None], torch.arange(9)[None])[0]
    torch.testing.assert_close(run_on_prompt(graph_module, ids), expected, rtol=1e-4, atol=1e-4)


@needs_packing
def test_each_original_goes_at_its_last_use():
    given = originals()
    alive = {name: weakref.ref(tensor) for name, tensor in given.items()}
    seen: list[list[str]] = []

    def released(size: int) -> None:
        assert size == 3 * 40 * 4
        seen.append([name for name in alive if alive[name]() is not None])

    resources: list[Any] = []
    result = make_all(["packed", "d", "packed_c", "both"], MADE, given, resources, released=released)
    # d is served, as another tensor over its memory; a and b are packed first but needed to the end
    assert seen == [["a", "b", "c"], ["a", "b"], ["a"], []]
    assert not given and len(resources) == 2
    assert torch.equal(result["d"], torch.full((3, 40), 4.0))
    assert torch.equal(result["both"][:, 0], torch.tensor([1.0, 1, 1, 2, 2, 2]))


@pytest.fixture
def taken_back(monkeypatch) -> list[int]:
    """Addresses of the tensors whose memory the system took."""
    addresses: list[int] = []
    monkeypatch.setattr(made_tensors, "take_back", lambda tensor: addresses.append(tensor.data_ptr()))
    return addresses


def test_memory_of_a_model_that_others_hold_is_left_alone(taken_back):
    make_all(["both"], MADE, originals(), [])
    make_all(["both"], MADE, originals(), [], owned=True, held=["a", "b"])
    assert not taken_back


def test_memory_goes_when_no_tensor_over_it_is_needed(taken_back):
    """Of two names of a tensor, or of one that lies in another, the last one decides; what is served stays."""
    given = originals()
    given["tied"], given["inside"], given["d"] = given["a"], given["b"][1:], given["c"][:2]
    addresses = {name: tensor.data_ptr() for name, tensor in given.items()}
    made = {"one": Concatenated(("a", "b")), "two": Concatenated(("inside", "tied")), "three": Concatenated(("c", "c"))}
    make_all(["one"], made, dict(given), [], owned=True)
    assert sorted(taken_back) == sorted([addresses["a"], addresses["b"]])
    taken_back.clear()
    make_all(["one", "d", "two", "three"], made, given, [], owned=True)
    assert sorted(taken_back) == sorted([addresses["tied"], addresses["inside"]])
