"""Notes what the next start of a folder needs (``chunkc.kept_start``), while the model object is there to look at."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from chunkc import artifacts, kept_start, recorded_logits
from chunkc.check import ModelLogits
from chunkc.checkpoint import Checkpoint
from chunkc.config import GenerationDefaults
from chunkc.entrance import Entrance
from chunkc.imported_files import imported_since
from chunkc.kept_start import KeptStart, Source
from chunkc.kernels.cpu_memory import take_back
from chunkc.passes.made_tensors import ingredients
from chunkc.prepared import Prepared, own_tensor
from chunkc.tokenizer_loading import direct_class

#: bytes of tensors that are no weights; more are not worth keeping
_LARGEST_BUFFERS = 64 * 2**20
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Draft:
    """A start that is to be kept if its check succeeds.

    Attributes:
        entrance: of the process that makes it.
        model_key, weights, generation, tokenizer: see ``KeptStart``.
        buffers: see ``kept_start.store``.
    """

    entrance: Entrance
    model_key: str
    weights: dict[str, Source]
    buffers: dict[str, torch.Tensor]
    generation: dict[str, Any]
    tokenizer: str | None


def draft(
    entrance: Entrance | None, model_key: str | None, model: nn.Module, prepared: Prepared, tokenizer: Any
) -> Draft | None:
    """What is to be kept of a start, or None where the next cannot do without the model object.

    Args:
        entrance: with the folder that the model was loaded from.
        model_key: of the prepared model.
        model: as it was loaded and is to be served; it holds its tensors.
        prepared: of that model.
        tokenizer: that was loaded with it, or None.
    """
    if entrance is None or model_key is None or not entrance.state.is_settled(entrance.time):
        return None
    if getattr(getattr(model, "config", None), "transformers_weights", None) is not None:
        return None  # it names files of its own choice
    generation = _generation(getattr(model, "generation_config", None))
    found = _origins(model, prepared, entrance.checkpoint)
    if generation is None or found is None:
        return None
    name = None if tokenizer is None else direct_class(entrance.folder, tokenizer)
    return Draft(entrance, model_key, *found, generation, name)


def keep(draft: Draft, expected: ModelLogits) -> None:
    """Keep a start whose graph gives these logits of the model, where the prepared model was kept.

    It is not kept where files changed meanwhile: the model may be of either.
    """
    entrance = draft.entrance
    known = kept_start.find(entrance.key, entrance.state)
    if known is not None and known.kept.model_key == draft.model_key:
        return  # another process was faster
    imported = imported_since(entrance.modules, entrance.path)
    if imported is None or not entrance.is_unchanged() or artifacts.find("model", draft.model_key) is None:
        return
    kept = KeptStart(
        model_key=draft.model_key,
        folder=entrance.state,
        imported=imported,
        weights=draft.weights,
        generation=draft.generation,
        tokenizer=draft.tokenizer,
    )
    kept_start.store(entrance.key, kept, draft.buffers, recorded_logits.record(expected))


def _generation(config: Any) -> dict[str, Any] | None:
    """The generation defaults that count, as a mapping that can be written down; None where it cannot."""
    defaults = GenerationDefaults.of(config)
    try:
        found: dict[str, Any] = json.loads(json.dumps({**defaults.values, **defaults.not_applied}))
    except (TypeError, ValueError):
        return None
    return found if GenerationDefaults.of(found) == defaults else None


def _origins(
    model: nn.Module, prepared: Prepared, checkpoint: Checkpoint
) -> tuple[dict[str, Source], dict[str, torch.Tensor]] | None:
    """Which tensors of the folder the program's weights are made of, and copies of the model's others.

    What the names say is compared with what the tensors hold: so no rule by which transformers renames, merges or
    converts weights is taken for another.

    Returns:
        None where a weight is not one of the folder's, as it stands or in another dtype.
    """
    aliases = _aliases(model)
    weights, buffers = {}, {}
    for name in sorted({part for each in prepared.program.weights for part in ingredients(each, prepared.made)}):
        tensor = own_tensor(model, name)
        if tensor is None:  # a constant, kept with the prepared model
            continue
        saved = [alias for alias in aliases.get(id(tensor), ()) if alias in checkpoint]
        if saved and _is(tensor, saved[0], checkpoint):
            weights[name] = Source(saved[0], tensor.dtype)
        elif saved or isinstance(tensor, nn.Parameter):
            return None
        else:
            buffers[name] = tensor.detach().clone()
    return (weights, buffers) if sum(each.nbytes for each in buffers.values()) <= _LARGEST_BUFFERS else None


def _aliases(model: nn.Module) -> Mapping[int, list[str]]:
    """All names of each tensor, by its ``id``: with and without the prefix that base models' files lack."""
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: dict[int, list[str]] = {}
    for name, tensor in _named(model):
        names = [name, name.removeprefix(prefix)] if name.startswith(prefix) else [name]
        found.setdefault(id(tensor), []).extend(names)
    return found


def _named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _is(tensor: torch.Tensor, name: str, checkpoint: Checkpoint) -> bool:
    """Whether the model's tensor is that of the folder, bit for bit, converted to its dtype at most."""
    if checkpoint.shape(name) != tuple(tensor.shape):
        return False
    saved = checkpoint.tensor(name)
    same = torch.equal(_bits(saved.to(tensor.dtype)), _bits(tensor.detach()))
    take_back(saved)
    return same


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As numbers of which no two differ and are equal, as zeros do, or are the same and differ, as NaNs do."""
    return tensor.view(_OF_SIZE[tensor.dtype.itemsize])
