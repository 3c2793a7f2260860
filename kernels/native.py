"""Native libraries: built from the C++ sources beside this file at first use, and kept.

A library lies in ``$CHUNKC_CACHE_DIR`` (or ``~/.cache/chunkc``) under a key of what decides whether it fits: its
sources and flags, the CPU, and torch and Python where it links torch. A build happens under a file lock that the
system drops when its process dies, into a file of its own, which is renamed into place when it is whole: several
processes may start at once, and a killed build leaves nothing that a later one could trip over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from chunkc.errors import ChunkcError

_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared")


@dataclass(frozen=True)
class NativeLibrary:
    """A library and what it is built from.

    Args:
        name: of the file, and of the folder it is kept in: ``cpu_linear``.
        sources: file names in this folder: the one to compile, then all it includes.
        flags: of the compiler, beside those that all libraries have.
        torch: whether it includes and links torch.
    """

    name: str
    sources: tuple[str, ...]
    flags: tuple[str, ...] = ()
    torch: bool = False

    def find_or_build(self) -> Path | None:
        """The library's path, built if the cache lacks it; None where there is no C++ compiler to build it.

        Raises:
            ChunkcError: the compiler could not build it, or the cache's folder cannot be written.
        """
        library = self._place()
        if _is_whole(library):
            return library
        cxx = compiler()
        if cxx is None:
            return None
        folder = library.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _file_lock(folder / "lock"):
                if not _is_whole(library):  # else another process built it while this one waited
                    self._compile(cxx, library)
        except OSError as error:
            raise ChunkcError(
                f"Cannot keep the library {self.name} in {folder}: {error}. "
                "Set CHUNKC_CACHE_DIR to a folder that can be written."
            ) from error
        return library

    def is_built(self) -> bool:
        """Whether the cache has it; whether as it was built, ``find_or_build`` sees."""
        return self._place().exists()

    def _place(self) -> Path:
        return cache_dir() / f"{self.name}-{self._key()}" / f"{self.name}.so"

    def _compile(self, cxx: str, library: Path) -> None:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
            built = Path(scratch) / library.name
            command = [cxx, *_FLAGS, *self.flags, str(Path(__file__).parent / self.sources[0]), "-o", str(built)]
            if self.torch:
                command += _torch_flags()
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise ChunkcError(
                    f"{cxx} could not build chunkc's library {self.name} (exit status {result.returncode}).\n"
                    f"{' '.join(command)}\n{result.stderr[-4000:]}"
                )
            # first the hash: a library without its own is built again, one with it is never half of one
            _hash_file(library).write_text(hashlib.sha256(built.read_bytes()).hexdigest())
            os.replace(built, library)

    def _key(self) -> str:
        """Hash of all that decides whether a built library can serve this process."""
        parts = [(Path(__file__).parent / name).read_bytes() for name in self.sources]
        facts = [*_FLAGS, *self.flags, instruction_sets()]
        if self.torch:
            facts += [torch.__version__, sys.version]
        return hashlib.sha256(b"\0".join(parts + [fact.encode() for fact in facts])).hexdigest()[:16]


def _hash_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _is_whole(library: Path) -> bool:
    """Whether a library is there as it was built: loading half of one kills the process."""
    try:
        return hashlib.sha256(library.read_bytes()).hexdigest() == _hash_file(library).read_text()
    except OSError:
        return False


def cache_dir() -> Path:
    """The folder that built libraries are kept in: ``$CHUNKC_CACHE_DIR`` or ``~/.cache/chunkc``."""
    return Path(os.environ.get("CHUNKC_CACHE_DIR") or "~/.cache/chunkc").expanduser()


def compiler() -> str | None:
    """Path of the C++ compiler: ``$CXX``, or the first of the usual ones."""
    if os.environ.get("CXX"):
        return shutil.which(os.environ["CXX"])
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _torch_flags() -> list[str]:
    from torch.utils import cpp_extension  # imports setuptools, which only a build should pay for

    flags = [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    return [*flags, *(f"-L{path}" for path in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def instruction_sets() -> str:
    """The CPU's instruction sets: code built with -march=native may not run on another CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"
