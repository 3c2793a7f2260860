"""Builds the C++ body of ``chunkc::mixed_attention`` at first use, and loads it.

The library lies in ``$CHUNKC_CACHE_DIR`` (or ``~/.cache/chunkc``) under a key of what decides whether it
fits: its sources and flags, the CPU, torch and Python. A build happens under a file lock that the system
drops when its process dies, into a file of its own, which is renamed into place when it is whole: several
processes may start at once, and a killed build leaves nothing that a later one could trip over.

Loading registers the body for CPU tensors in torch's dispatcher; nothing else has to know which body runs.
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
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from chunkc.errors import ChunkcError
from chunkc.kernels import ops  # noqa: F401  the library's registrations need the operator's definition

_SOURCES = ("cpu_attention.cpp", "cpu_task.h", "cpu_products.h", "cpu_simd.h")
_CODE_FLAGS = ("-std=c++20", "-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast")
_FLAGS = (*_CODE_FLAGS, "-fopenmp", "-fPIC", "-shared")

_lock = threading.Lock()
_loaded: bool | None = None  # None: not tried yet


def load() -> bool:
    """Make the C++ body serve CPU tensors; True if it does.

    The first call on a machine builds the library (about 15 seconds). Without a C++ compiler it warns, once,
    and returns False: the reference then serves, with the same results and much slower.

    Raises:
        ChunkcError: a compiler is there but could not build the library, or the library does not load.
    """
    global _loaded
    with _lock:
        if _loaded is None:
            library = _find_or_build()
            if library is not None:
                try:
                    torch.ops.load_library(str(library))
                except (OSError, RuntimeError) as error:
                    raise ChunkcError(f"The attention library {library} does not load: {error}") from error
            _loaded = library is not None
        return _loaded


def active_body() -> str:
    """Which body serves CPU tensors in this process: ``"cpp"`` or ``"reference"``."""
    return "cpp" if _loaded else "reference"


def cache_dir() -> Path:
    """The folder that built libraries are kept in: ``$CHUNKC_CACHE_DIR`` or ``~/.cache/chunkc``."""
    return Path(os.environ.get("CHUNKC_CACHE_DIR") or Path.home() / ".cache" / "chunkc")


def _find_or_build() -> Path | None:
    """Path of the library, built if the cache lacks it; None, with a warning, where nothing can build it."""
    folder = cache_dir() / f"cpu-{_key()}"
    library = folder / "cpu_attention.so"
    if library.exists():
        return library
    compiler = _compiler()
    if compiler is None:
        warnings.warn(
            "chunkc found no C++ compiler (looked for $CXX, c++, g++, clang++), so attention on CPU runs on "
            "its slow reference body. Install g++ or clang, or set CXX.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _file_lock(folder / "lock"):
            if not library.exists():  # else another process built it while this one waited
                _compile(compiler, library)
    except OSError as error:
        raise ChunkcError(
            f"Cannot keep the attention library in {folder}: {error}. "
            "Set CHUNKC_CACHE_DIR to a folder that can be written."
        ) from error
    return library


def _compiler() -> str | None:
    if os.environ.get("CXX"):
        return shutil.which(os.environ["CXX"])
    return next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


def _compile(compiler: str, library: Path) -> None:
    from torch.utils import cpp_extension  # imports setuptools, which only a build should pay for

    source = Path(__file__).parent / _SOURCES[0]
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as scratch:
        built = Path(scratch) / library.name
        command = [compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
        command += [f"-isystem{path}" for path in cpp_extension.include_paths()]
        command += [str(source), "-o", str(built)]
        command += [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            raise ChunkcError(
                f"{compiler} could not build chunkc's attention library (exit status {result.returncode}).\n"
                f"{' '.join(command)}\n{result.stderr[-4000:]}"
            )
        os.replace(built, library)


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key() -> str:
    """Hash of all that decides whether a built library can serve this process."""
    parts = [(Path(__file__).parent / name).read_bytes() for name in _SOURCES]
    parts += [fact.encode() for fact in (*_FLAGS, torch.__version__, sys.version, _cpu())]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _cpu() -> str:
    """The CPU's instruction sets: code built with -march=native may not run on another CPU."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return f"{platform.machine()} {platform.processor()}"
