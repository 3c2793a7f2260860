"""Compiled graphs, prepared models and kept starts on disk, so that a second start does not prepare again.

An entry is a folder ``<kind>-<key>`` under ``$CHUNKC_CACHE_DIR`` (or ``~/.cache/chunkc``) that holds plain files -
libraries, JSON, safetensors, never pickles - and ``entry.json``, which lists them with their hashes. It is written
beside its place and renamed into it when whole, so processes that start at once do not meet half of one. What does
not fit its hashes, or belongs to somebody else, is said in one line, deleted and made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkc.kernels.native import cache_dir

#: bytes that entries may take together; the ones used longest ago go first
DEFAULT_LIMIT = 2 * 2**30
_INDEX = "entry.json"
_KINDS = ("graph", "model", "start")


@dataclass(frozen=True)
class Entry:
    """What is kept under one key.

    Attributes:
        folder: where its files are.
        facts: what was said about it when it was stored.
    """

    folder: Path
    facts: Mapping[str, Any]


def key_of(*parts: str | bytes) -> str:
    """A key that stands for all of the parts."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def find(kind: str, key: str) -> Entry | None:
    """The entry of a key, checked, or None where there is none or it had to be deleted."""
    folder = _place(kind, key)
    if not folder.exists():
        return None
    try:
        facts = _checked(folder, key)
    except _Unusable as error:
        if not folder.exists():  # another process has just deleted it
            return None
        warnings.warn(f"the cache entry {folder} {error}; it is made again", RuntimeWarning, stacklevel=2)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)  # used now
    return Entry(folder, facts)


def store(
    kind: str, key: str, files: Mapping[str, Path | bytes], facts: Mapping[str, Any], twin: Entry | None = None
) -> Entry | None:
    """Keep files (paths to copy, or contents) under a key; None, with a warning, where the folder cannot be written.

    Args:
        twin: an entry with the same files. They are linked where that can be done, so that they take room, and are
            loaded by a process, once. Nothing writes to a file of an entry.
    """
    folder = _place(kind, key)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix="new-"))
        try:
            hashes = {}
            for name, content in files.items():
                data = content if isinstance(content, bytes) else content.read_bytes()
                if twin is None or not _link(twin.folder / name, scratch / name, data):
                    (scratch / name).write_bytes(data)
                hashes[name] = hashlib.sha256(data).hexdigest()
            index = {"key": key, "facts": dict(facts), "files": hashes, "created": time.time()}
            (scratch / _INDEX).write_text(json.dumps(index))
            # where another process was faster, its entry is as good and may be in use
            with contextlib.suppress(OSError):
                scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        warnings.warn(
            f"compiled graphs cannot be kept in {folder.parent} ({error}), so the next start compiles again; set "
            "CHUNKC_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    _keep_within(DEFAULT_LIMIT)
    return find(kind, key)


def remove(entry: Entry) -> None:
    """Delete one entry, at once for other processes; libraries of it that are loaded stay loaded."""
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=entry.folder.parent, prefix="old-") as scratch:
        entry.folder.rename(Path(scratch) / entry.folder.name)


def entries() -> list[tuple[Path, int, float]]:
    """(folder, bytes, time of last use) of every entry, the one used last first."""
    return sorted(_folders(), key=lambda found: -found[2])


def clear() -> int:
    """Delete all entries; returns how many there were."""
    found = entries()
    for folder, _, _ in found:
        shutil.rmtree(folder, ignore_errors=True)
    return len(found)


def _link(file: Path, link: Path, data: bytes) -> bool:
    """Make a link to a file if it holds these data; False where it does not, or where there can be none."""
    try:
        os.link(file, link)  # and then look: another file may take its place at any time
        if link.read_bytes() == data:
            return True
        link.unlink()
    except OSError:  # also of file systems that have no links
        pass
    return False


def _place(kind: str, key: str) -> Path:
    assert kind in _KINDS
    return cache_dir() / f"{kind}-{key}"


def _folders() -> Iterator[tuple[Path, int, float]]:
    for kind in _KINDS:
        for folder in cache_dir().glob(f"{kind}-*"):
            with contextlib.suppress(OSError):  # another process may delete it at any time
                yield folder, sum(file.stat().st_size for file in folder.iterdir()), folder.stat().st_mtime


def _keep_within(limit: int) -> None:
    total = 0
    for folder, size, _ in entries():
        total += size
        if total > limit:
            shutil.rmtree(folder, ignore_errors=True)


class _Unusable(Exception):
    """Why an entry cannot be used, in words."""


def _checked(folder: Path, key: str) -> dict[str, Any]:
    """The facts of an entry of which every file is as it was stored."""
    try:
        index = json.loads((folder / _INDEX).read_text())
        if index["key"] != key or not isinstance(index["facts"], dict):
            raise _Unusable("is of another key")
        # nobody else may enter a folder made by mkdtemp, so its files' own modes do not matter
        if folder.lstat().st_uid != os.getuid() or folder.lstat().st_mode & 0o077:
            raise _Unusable("is open to others")
        for name, expected in index["files"].items():
            if hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
                raise _Unusable(f"is damaged ({name})")
        return dict(index["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _Unusable(f"cannot be read ({type(error).__name__}: {error})") from error
