"""The C++ body of ``chunkc::mixed_attention``: built at first use (see ``native.py``), and loaded.

Loading registers the body for CPU tensors in torch's dispatcher; nothing else has to know which body runs.
"""

from __future__ import annotations

import threading
import warnings

import torch

from chunkc.errors import ChunkcError
from chunkc.kernels import (
    libraries,
    ops,  # noqa: F401  the library's registrations need the operator's definition
)

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
            library = libraries.ATTENTION.find_or_build()
            if library is None:
                warnings.warn(
                    "chunkc found no C++ compiler (looked for $CXX, c++, g++, clang++), so attention on CPU runs on "
                    "its slow reference body, linears run on oneDNN and plans are not balanced. Install g++ or clang, "
                    "or set CXX.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            else:
                try:
                    torch.ops.load_library(str(library))
                except (OSError, RuntimeError) as error:
                    raise ChunkcError(f"The attention library {library} does not load: {error}") from error
            _loaded = library is not None
        return _loaded


def active_body() -> str:
    """Which body serves CPU tensors in this process: ``"cpp"`` or ``"reference"``."""
    return "cpp" if _loaded else "reference"
