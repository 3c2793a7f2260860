"""What a folder's files are, without reading them: so that none can be another file unnoticed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: younger changes might be followed by others that the file system gives the same time
_YOUNG = 3.0  # seconds
_MOST_FILES = 10_000
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_CONFIGURATIONS = ("config.json", "tokenizer_config.json")
_NAMES_CODE_OR_FORMATS = {"auto_map", "quantization_config", "compression_config"}


@dataclass(frozen=True)
class FolderState:
    """The files of a folder and of those below it, links followed.

    Attributes:
        files: by their paths in it: size, times of change of the contents and of the file's entry, in nanoseconds, and
            the file's number.
        changed: the latest of the times.
    """

    files: dict[str, tuple[int, int, int, int]]
    changed: int

    def is_settled(self, at: float) -> bool:
        """Whether no file was changed shortly before a time, in seconds: then a later change shows."""
        return self.changed < int((at - _YOUNG) * 1e9)


def state_of(folder: Path) -> FolderState | None:
    """The state of a folder now; None where it cannot be told, or has files that no state stands for.

    Those are code, adapters, and configurations that name code or packed weights.
    """
    files = {}
    try:
        for path in _files(folder):
            name = os.path.basename(path)
            if name.endswith((".py", ".pyc", ".so")) or name in _ADAPTERS or len(files) == _MOST_FILES:
                return None
            found = os.stat(path)
            files[os.path.relpath(path, folder)] = (
                *(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino),
            )
        for name in _CONFIGURATIONS:
            if name in files and _names_more(json.loads((folder / name).read_text(encoding="utf-8"))):
                return None
    except (OSError, ValueError, RecursionError):
        return None
    return FolderState(files, max((max(times[1:3]) for times in files.values()), default=0))


def now() -> float:
    """The time that files' times are compared with, in seconds."""
    return time.time()


def _files(folder: Path) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    seen = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=fail):
        found = os.stat(place)
        if (found.st_dev, found.st_ino) in seen:  # a link to a folder above it
            folders.clear()
            continue
        seen.add((found.st_dev, found.st_ino))
        for name in names:
            yield os.path.join(place, name)


def _names_more(data: Any) -> bool:
    parts = list(data.values()) if isinstance(data, dict) else data if isinstance(data, list) else []
    named = isinstance(data, dict) and any(data.get(name) for name in _NAMES_CODE_OR_FORMATS)
    return named or any(map(_names_more, parts))
