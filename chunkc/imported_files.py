"""The files that packages were imported from, and whether another process would import the same."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from chunkc.clean_process import PACKAGES

_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class ImportedFiles:
    """Where packages came from.

    Attributes:
        files: of modules: size, times of change of the contents and of the file's entry, in nanoseconds, and the file's
            number.
        origins: what the import of a package finds first, or None where there is none of the name.
        folders: that packages are installed in: time of the last change, when something was put there or taken away.
    """

    files: dict[str, tuple[int, int, int, int]]
    origins: dict[str, str | None]
    folders: dict[str, int]

    def are_the_same(self) -> bool:
        """Whether this process would import the same files."""
        try:
            same = all(_stat(file) == found for file, found in self.files.items())
            same = same and self.folders == _folders(sys.path)
            return same and self.origins == {name: origin(name, sys.path) for name in self.origins}
        except OSError:
            return False


def imported_since(before: Collection[str], path: Sequence[str]) -> ImportedFiles | None:
    """The files of what was imported meanwhile, but for torch's and Python's own.

    Args:
        before: names of the modules that were imported then.
        path: what ``sys.path`` was then; what is imported may add to it.

    Returns:
        None where a module is not the one that an import would find.
    """
    files: dict[str, tuple[int, int, int, int]] = {}
    origins = {name: origin(name, path) for name in PACKAGES}
    try:
        for name, module in list(sys.modules.items()):
            package = name.partition(".")[0]
            if name in before or package in ("torch", "chunkc") or package in sys.stdlib_module_names:
                continue
            found = origins[package] if package in origins else origin(package, path)
            file = getattr(module, "__file__", None)
            if name == package in PACKAGES and file != found:
                return None
            if file is None or found is None:  # made at run time, as compiled graphs are, or found by a package alone
                continue
            origins[package] = found
            files[file] = _stat(file)
        return ImportedFiles(files, origins, _folders(path))
    except OSError:
        return None


def origin(package: str, path: Sequence[str]) -> str | None:
    """The file that the import of a package would run first, with ``path`` as ``sys.path``."""
    spec = PathFinder.find_spec(package, path)
    if spec is None:
        return None
    return spec.origin if spec.has_location else ":".join(spec.submodule_search_locations or ())


def _stat(file: str) -> tuple[int, int, int, int]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _folders(path: Sequence[str]) -> dict[str, int]:
    found = {}
    for folder in path:
        if Path(folder).name in _INSTALLED and os.path.isdir(folder):
            found[folder] = os.stat(folder).st_mtime_ns
    return found
