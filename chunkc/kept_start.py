"""What an earlier start of a folder of weights leaves for the next, which then needs no model object.

The prepared model (``chunkc.prepared``) lies in the cache under a key that only a model object tells. A *kept start*
lies under a key of the folder's place, the options that count, and torch as it stands in the process. It names the
prepared model, says which tensor of the folder is which of the model's, and holds what the model made of the probe. It
is of use as long as all files that the model came from are the very same: those of the folder and those of the code.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from chunkc import artifacts, graph_library, source_files
from chunkc.dtypes import TorchDtype
from chunkc.folder_state import FolderState
from chunkc.imported_files import ImportedFiles, origin
from chunkc.live_torch import torch_digest
from chunkc.torch_settings import torch_settings

_DATA, _TENSORS = "start.json", "start.safetensors"
_BUFFER = "buffer:"


@dataclass(frozen=True)
class Source:
    """A tensor of the folder, and the dtype it is served in."""

    name: str
    dtype: TorchDtype


@dataclass(frozen=True)
class KeptStart:
    """The data of an entry.

    Attributes:
        model_key: of the prepared model.
        folder: the files it was loaded from.
        imported: those of the code that loaded it.
        weights: tensors of the folder by the names that the captured graph has for them.
        generation: the model's generation defaults, by HuggingFace's names.
        tokenizer: class that loads the tokenizer, or None (``tokenizer_loading.direct_class``).
    """

    model_key: str
    folder: FolderState
    imported: ImportedFiles
    weights: dict[str, Source]
    generation: dict[str, Any]
    tokenizer: str | None


@dataclass(frozen=True)
class FoundStart:
    """An entry that can be used.

    Attributes:
        kept: its data.
        buffers: tensors of the model that are not saved with it, by the graph's names.
        logits: see ``recorded_logits``.
    """

    kept: KeptStart
    buffers: dict[str, torch.Tensor]
    logits: dict[str, torch.Tensor]


@functools.cache
def _adapter() -> TypeAdapter[KeptStart]:
    return TypeAdapter(KeptStart)


def key_for(folder: Path, dtype: torch.dtype | None, page_size: int) -> str:
    """The key of a folder's start in this process.

    Args:
        dtype: what was asked for; None for the folder's own.
        page_size: of the key/value cache.

    Raises:
        NotClean: torch, as it stands in this process, has none.
    """
    versions = [f"{name} {metadata.version(name)}" for name in ("torch", "transformers", "tokenizers", "safetensors")]
    python = [sys.version, sys.prefix, str(origin("transformers", sys.path))]
    code = [source_files.own_sources(), torch_digest(), torch_settings(), graph_library.environment()]
    return artifacts.key_of(os.path.realpath(folder), str(dtype), str(page_size), *versions, *python, *code)


def store(key: str, kept: KeptStart, buffers: Mapping[str, torch.Tensor], logits: Mapping[str, torch.Tensor]) -> None:
    """Keep a start, in the place of one that is there.

    Args:
        buffers, logits: see ``FoundStart``.
    """
    from safetensors.torch import save

    tensors = {**{_BUFFER + name: tensor for name, tensor in buffers.items()}, **logits}
    files = {
        _DATA: _adapter().dump_json(kept),
        _TENSORS: save({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}),
    }
    forget(key)
    artifacts.store("start", key, files, {"weights": len(kept.weights)})


def find(key: str, folder: FolderState) -> FoundStart | None:
    """The start of a key; None where there is none, or some file that it came from is another.

    Args:
        folder: its state now.
    """
    entry = artifacts.find("start", key)
    if entry is None:
        return None
    try:
        kept = _adapter().validate_json((entry.folder / _DATA).read_bytes())
        if kept.folder != folder or not kept.imported.are_the_same():
            return None
        from safetensors.torch import load_file

        tensors = load_file(entry.folder / _TENSORS)
    except (ValidationError, OSError):  # of an older chunkc, or just deleted
        return None
    buffers = {name.removeprefix(_BUFFER): tensor for name, tensor in tensors.items() if name.startswith(_BUFFER)}
    logits = {name: tensor for name, tensor in tensors.items() if not name.startswith(_BUFFER)}
    return FoundStart(kept, buffers, logits)


def forget(key: str) -> None:
    """Delete the start of a key."""
    entry = artifacts.find("start", key)
    if entry is not None:
        artifacts.remove(entry)
