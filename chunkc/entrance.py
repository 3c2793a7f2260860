"""What is true when ``chunkc.compile`` is entered with a folder of weights, before anything of a model is imported.

Only with this may a start from the folder be used or be kept: nobody but chunkc has imported the code that makes a
model of the folder, so it runs as its files say, and what else counts is in the key. What another thread of the process
does meanwhile is not seen.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from chunkc import folder_state, kept_start
from chunkc.checkpoint import Checkpoint, open_checkpoint
from chunkc.clean_process import NotClean, check_imports
from chunkc.folder_state import FolderState
from chunkc.foreign_code import check_modules
from chunkc.models import locate, resolve_dtype


@dataclass(frozen=True)
class Entrance:
    """A folder whose start may be kept.

    Attributes:
        folder: where it is.
        checkpoint: its weights.
        state: its files.
        key: of its start.
        modules: names of the modules that were imported.
        path: where others are imported from.
        time: in seconds, as files' times are.
    """

    folder: Path
    checkpoint: Checkpoint
    state: FolderState
    key: str
    modules: frozenset[str]
    path: tuple[str, ...]
    time: float

    def is_unchanged(self) -> bool:
        """Whether the folder's files are still the same."""
        return folder_state.state_of(self.folder) == self.state


def enter(given: str | Path, dtype: str | torch.dtype | None, page_size: int) -> Entrance:
    """What is true now.

    Args:
        given, dtype, page_size: see ``chunkc.compile``.

    Raises:
        NotClean: a start from there can neither be used nor be kept; says why.
        ModelLoadError, ValueError: see ``chunkc.compile``.
    """
    modules, path, time = frozenset(sys.modules), tuple(sys.path), folder_state.now()
    asked, folder = resolve_dtype(dtype), locate(given)
    if not isinstance(folder, Path):
        raise NotClean(f"{folder} is a name on the hub, where files may be newer")
    if not folder.is_dir():
        raise NotClean(f"{folder.name} is no folder")
    try:
        check_imports()
        check_modules()
        state = folder_state.state_of(folder)
        if state is None:
            raise NotClean("it holds code, an adapter or packed weights, or files that cannot be looked at")
        checkpoint = open_checkpoint(folder)
        if checkpoint is None:
            raise NotClean("its weights are not all in safetensors files that are whole")
        key = kept_start.key_for(folder, asked, page_size)
    except NotClean:
        raise
    except Exception as error:  # whatever stands in the place of torch's functions, or of a module, raises
        raise NotClean(f"what this process is cannot be told ({type(error).__name__}: {error})") from error
    return Entrance(folder, checkpoint, state, key, modules, path, time)
