"""How the tensors that passes make come from the model's own: so that they can be made again without the passes.

A pass registers a tensor on the graph (``register_made``) by saying what it is made of. Names are those of the graph's
attributes; what is not in ``context.made`` is the captured model's parameter, buffer or constant of that name. Where
the context says that tensors are deferred the graph holds a fake one, which no computation takes for real, and
``make_all`` makes the real ones when the passes are done, letting go of what they are made of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from chunkc.kernels.cpu_memory import take_back
from chunkc.kernels.packed_linear import PackedWeight


@dataclass(frozen=True)
class Concatenated:
    """Tensors one behind the other along dimension 0; a number stands for as many zeros."""

    parts: tuple[str | int, ...]
    kind: Literal["concatenated"] = "concatenated"


@dataclass(frozen=True)
class Packed:
    """The handle of a weight packed for ``chunkc::packed_linear``, which wants [N, K]: transposed first, or not.

    Where it is ``gated``, for ``chunkc::fused_linear`` with an activation.
    """

    weight: str
    transposed: bool
    gated: bool = False
    kind: Literal["packed"] = "packed"


Made = Concatenated | Packed


def ingredients(name: str, made: Mapping[str, Made]) -> Iterator[str]:
    """Names of the model's own tensors that a tensor is made of, each as often as it is needed."""
    how = made.get(name)
    if how is None:
        yield name
        return
    for part in (how.weight,) if isinstance(how, Packed) else how.parts:
        if isinstance(part, str):
            yield from ingredients(part, made)


def make(
    name: str,
    made: Mapping[str, Made],
    original: Callable[[str], torch.Tensor],
    resources: list[Any],
    consumed: Callable[[str], bool] = lambda name: False,
) -> torch.Tensor:
    """The tensor of a name.

    Args:
        name: of an attribute of the graph.
        made: how tensors were made, by name.
        original: gives the model's own tensors by name.
        resources: what must live as long as the tensor is used is appended.
        consumed: whether a tensor that ``original`` gave may be undone (``PackedWeight``).
    """
    how = made.get(name)
    if how is None:
        return original(name)
    if isinstance(how, Packed):
        weight = make(how.weight, made, original, resources, consumed)
        may_go = how.weight in made or consumed(how.weight)
        packed = PackedWeight(weight.t() if how.transposed else weight, consumed=may_go, gated=how.gated)
        resources.append(packed)
        return packed.handle
    found = {part: make(part, made, original, resources) for part in how.parts if isinstance(part, str)}
    like = next(iter(found.values()))
    return torch.cat([found[part] if isinstance(part, str) else like.new_zeros(part) for part in how.parts]).detach()


def make_all(
    names: Sequence[str],
    made: Mapping[str, Made],
    originals: dict[str, torch.Tensor],
    resources: list[Any],
    *,
    owned: bool = False,
    held: Collection[str] = (),
    released: Callable[[int], None] = lambda size: None,
) -> dict[str, torch.Tensor]:
    """The tensors of all names.

    Args:
        names, made, resources: see ``make``.
        originals: the model's own tensors by name. Each is taken out at its last use, so that it goes at once where
            nobody else holds it.
        owned: nobody else holds any of them, nor a view: then a weight goes piece by piece while it is packed.
        held: names of those that somebody holds all the same.
        released: called with the size in bytes of each that was taken out.
    """
    needed = [part for name in names for part in ingredients(name, made)]
    uses = Counter(needed)
    memory = _shared_memory(originals)
    readers = Counter(memory[name] for name in needed)
    readers.update(memory[name] for name in names if name not in made)  # served as it is: needed to the end
    readers.update(memory[name] for name in held)
    taken: dict[str, torch.Tensor] = {}

    def take(name: str) -> torch.Tensor:
        uses[name] -= 1
        readers[memory[name]] -= 1
        if uses[name]:
            return originals[name]
        taken[name] = originals.pop(name)
        return taken[name]

    def is_read(name: str) -> bool:
        return owned and not readers[memory[name]]

    result = {}
    for name in names:
        result[name] = make(name, made, take, resources, is_read).detach()
        while taken:
            part, tensor = taken.popitem()
            if is_read(part) and tensor.is_contiguous():
                take_back(tensor)
            size = tensor.nbytes
            del tensor
            released(size)
    return result


def _shared_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """A number for each name, the same for those whose tensors overlap in memory."""
    spans = []
    for name, tensor in tensors.items():
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize, name))
    numbers: dict[str, int] = {}
    reached, number = 0, 0
    for begin, end, name in sorted(spans):
        number += begin >= reached
        reached = max(reached, end)
        numbers[name] = number
    return numbers
