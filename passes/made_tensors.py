"""How the tensors that passes make come from the model's own: so that they can be made again without the passes.

A pass that registers a tensor on the graph says so in ``context.made[name]``. Names are those of the graph's
attributes; what is not in ``context.made`` is the captured model's parameter, buffer or constant of that name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from chunkc.kernels.packed_linear import PackedWeight


@dataclass(frozen=True)
class Concatenated:
    """Tensors one behind the other along dimension 0; a number stands for as many zeros."""

    parts: tuple[str | int, ...]
    kind: Literal["concatenated"] = "concatenated"


@dataclass(frozen=True)
class Packed:
    """The handle of a weight packed for ``chunkc::packed_linear``, which wants [N, K]: transposed first, or not."""

    weight: str
    transposed: bool
    kind: Literal["packed"] = "packed"


Made = Concatenated | Packed


def make(
    name: str, made: Mapping[str, Made], original: Callable[[str], torch.Tensor], resources: list[Any]
) -> torch.Tensor:
    """The tensor of a name.

    Args:
        name: of an attribute of the graph.
        made: how tensors were made, by name.
        original: gives the model's own tensors by name.
        resources: what must live as long as the tensor is used is appended.
    """
    how = made.get(name)
    if how is None:
        return original(name)
    if isinstance(how, Packed):
        weight = make(how.weight, made, original, resources)
        packed = PackedWeight(weight.t() if how.transposed else weight)
        resources.append(packed)
        return packed.handle
    found = {part: make(part, made, original, resources) for part in how.parts if isinstance(part, str)}
    like = next(iter(found.values()))
    return torch.cat([found[part] if isinstance(part, str) else like.new_zeros(part) for part in how.parts]).detach()
