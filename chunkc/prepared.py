"""A prepared model: what capture, passes and lowering found, but for weights and compiled code.

It is kept on disk, so that a second start of the same model (``chunkc.fingerprint``) loads libraries, lays weights
out and serves. It is data, read back and checked by pydantic; constants lie beside it as safetensors.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import nn

from chunkc import artifacts, graph_library
from chunkc.artifacts import Entry
from chunkc.graph_library import GraphFunction
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.passes.attributes import MODEL_ATTRIBUTE, attribute
from chunkc.passes.made_tensors import Concatenated, Made, Packed, ingredients
from chunkc.passes.reports import PassRecord
from chunkc.program import Program

_DATA, _CONSTANTS = "model.json", "constants.safetensors"


@dataclass(frozen=True)
class Prepared:
    """What serving needs to know of a model.

    Attributes:
        program: the parts of its graph.
        functions: cache keys of their functions, one a kind; empty in mode "eager".
        made: how the tensors that passes made come from the model's own.
        layers: its attention calls, in graph order.
        vocab_size: columns of the logits.
        max_positions: longest sequence it is defined for, in tokens, or None where it does not say.
        proven_length: longest sequence up to which the meaning of every mask is proven, or None for no limit.
        route, refused, capture_seconds, records: see ``Rewritten``.
    """

    program: Program
    functions: tuple[str, ...]
    made: dict[str, Annotated[Concatenated | Packed, Field(discriminator="kind")]]
    layers: tuple[AttentionLayer, ...]
    vocab_size: int
    max_positions: int | None
    proven_length: int | None
    route: str
    refused: tuple[str, ...]
    capture_seconds: float
    records: tuple[PassRecord, ...]

    @property
    def longest(self) -> int:
        """Longest sequence that may be served, in tokens."""
        return min(self.max_positions or sys.maxsize, self.proven_length or sys.maxsize)


@functools.cache
def _adapter() -> TypeAdapter[Prepared]:
    return TypeAdapter(Prepared)


def store(key: str, prepared: Prepared, constants: Mapping[str, torch.Tensor]) -> None:
    """Keep a prepared model under its fingerprint.

    Args:
        key: of the model and of how it is to be prepared.
        prepared: in mode "compiled".
        constants: weights of the program that are neither the model's nor made of the model's, by name.
    """
    from safetensors.torch import save

    files: dict[str, Any] = {_DATA: _adapter().dump_json(prepared)}
    if constants:
        files[_CONSTANTS] = save({name: tensor.detach().contiguous().clone() for name, tensor in constants.items()})
    artifacts.store("model", key, files, {"parts": len(prepared.program.parts)})


def load_prepared(entry: Entry) -> tuple[Prepared, list[GraphFunction], Mapping[str, torch.Tensor]] | None:
    """The prepared model of a cache entry, its functions, and its constants.

    Returns:
        None where a piece is not there.
    """
    try:
        prepared = _adapter().validate_json((entry.folder / _DATA).read_bytes())
    except ValidationError:  # of an older chunkc
        return None
    functions = [graph_library.find(key) for key in prepared.functions]
    found = [function for function in functions if function is not None]
    if len(found) != len(functions):
        return None
    constants: Mapping[str, torch.Tensor] = {}
    if (entry.folder / _CONSTANTS).exists():
        from safetensors.torch import load_file

        constants = load_file(entry.folder / _CONSTANTS)
    return prepared, found, constants


def originals_of(
    program: Program, made: Mapping[str, Made], model: nn.Module, constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a program's weights are made of, by name: tensors of the model, or else ``constants``."""
    names = {part for name in program.weights for part in ingredients(name, made)}
    own = {name: own_tensor(model, name) for name in names}
    return {name: constants[name] if tensor is None else tensor for name, tensor in own.items()}


def own_tensor(model: nn.Module, name: str) -> torch.Tensor | None:
    """The model's tensor that the captured graph calls ``name``, or None where it has none."""
    path = name.removeprefix(f"{MODEL_ATTRIBUTE}.")
    if path == name:
        return None
    try:
        found = attribute(model, path)
    except AttributeError:
        return None
    return found if isinstance(found, torch.Tensor) else None
