"""The C++ body of ``chunkc::mixed_attention``: built at first use (see ``native.py``), and loaded, for each dtype.

The first library that is loaded registers the body for CPU tensors in torch's dispatcher, and hands calls on to those
that are loaded for other dtypes; nothing else has to know which body runs.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from pathlib import Path

import torch

from chunkc.errors import ChunkcError
from chunkc.kernels import (
    libraries,
    ops,  # noqa: F401  the library's registrations need the operator's definition
)

_lock = threading.Lock()
_loaded: dict[torch.dtype, ctypes.CDLL] = {}  # the first one registered the operator
_has_warned = False


def load(dtype: torch.dtype | None = None) -> bool:
    """Make the C++ body serve CPU tensors; True if it does.

    The first call on a machine builds the library, which takes a compiler about 4 seconds. Without a C++ compiler it
    warns, once, and returns False: the reference then serves, with the same results and much slower.

    Args:
        dtype: of the queries, keys and values that are to be served; None for all that can be. A call of the operator
            for another one is an error from then on.

    Raises:
        ChunkcError: a compiler is there but could not build the library, or the library does not load, or there is no
            compiler, and another dtype's library is loaded.
        ValueError: for such a dtype there is no body in C++.
    """
    if dtype is not None and dtype not in libraries.ATTENTION:
        raise ValueError(f"attention on CPU is for float32, bfloat16 and float16, not {dtype}")
    with _lock:
        loaded = True
        for each in libraries.ATTENTION if dtype is None else [dtype]:
            loaded = _load(each) and loaded
        return loaded


def _load(dtype: torch.dtype) -> bool:
    if dtype in _loaded:
        return True
    library = libraries.ATTENTION[dtype].find_or_build()
    if library is not None:
        _loaded[dtype] = _serve(library)
        return True
    if _loaded:
        raise ChunkcError(
            f"there is no C++ compiler to build attention for {dtype}, as there was for other dtypes. Install g++ or "
            "clang, or set CXX."
        )
    global _has_warned
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "chunkc found no C++ compiler (looked for $CXX, c++, g++, clang++), so attention on CPU runs on "
            "its slow reference body, linears run on oneDNN and plans are not balanced. Install g++ or clang, "
            "or set CXX.",
            RuntimeWarning,
            stacklevel=3,
        )
    return False


def _serve(path: Path) -> ctypes.CDLL:
    """Load a library, and have the first one that was loaded hand calls on to it."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ChunkcError(f"The attention library {path} does not load: {error}") from error
    library.chunkc_attention_body.restype = ctypes.c_void_p
    library.chunkc_register_attention.restype = ctypes.c_bool
    first = next(iter(_loaded.values()), library)
    place, body = library.chunkc_attention_place(), ctypes.c_void_p(library.chunkc_attention_body())
    first.chunkc_serve_attention(ctypes.c_int(place), body)
    if first is library and not library.chunkc_register_attention():
        raise ChunkcError(f"The attention library {path} could not register its operator")
    return library


def active_body() -> str:
    """Which body serves CPU tensors in this process: ``"cpp"`` or ``"reference"``."""
    return "cpp" if _loaded else "reference"
