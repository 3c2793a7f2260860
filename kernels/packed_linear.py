"""``chunkc::packed_linear``: a linear whose weight was laid out once for the CPU's matrix kernels.

A plain weight is reordered in every call, or multiplied by a slower kernel. Packed weights are opaque to the
compiler, so the graph does not hold them: it holds a *handle*, an int64 tensor of one element, like any weight, and
the operator finds the packed weight by the number in it. One compiled graph thus serves any weights.

The body is C++ (``cpu_linear.cpp``), built when the first weight is packed. It has kernels of its own for float32
where there is AVX512 and for bfloat16 where there is AVX512-BF16 but no AMX, and calls oneDNN elsewhere. Without a
compiler the body below calls oneDNN. The own kernels need no choice by measurement: for the linears of SmolLM2-135M
on a core of Zen 4 they take, in ms, with oneDNN's time (called from C++ too) behind the slash,

====  =============  =============
rows  float32        bfloat16
====  =============  =============
1     21.2 / 47.3    11.5 / 26.5
8     24.3 / 48.5    12.3 / 27.1
16    40.9 / 62.4    21.0 / 35.1
64    126 / 148      63.8 / 77.1
512   994 / 1024     499 / 530
====  =============  =============

and no shape among them, nor among others up to 11008 x 2048, is slower. A row's result depends on no other row.

``chunkc::packed_rows`` reads rows of a packed weight back, exactly: an embedding that shares its weight with the LM
head needs no second copy of it.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref

import torch

from chunkc.errors import ChunkcError
from chunkc.kernels import libraries

#: dtypes worth packing; the CPU must have instructions for the latter
_DTYPES = (torch.float32, torch.bfloat16)

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_tried = False
_onednn: ctypes.CDLL | None = None

# for the body in Python
_numbers = itertools.count()
_opaque: dict[int, torch.Tensor] = {}


class PackedWeight:
    """A weight [N, K], laid out. It lives as long as somebody holds this object, not the handle.

    Args:
        weight: [N, K], of a dtype that ``can_pack``.
        own: whether the kernels of this package may serve it; else oneDNN does.
        consumed: whether the weight's memory may be given back while it is read; its contents are undefined then. For
            who holds the only tensor over it.
        gated: whether the first half of the rows makes gates for the second: for ``chunkc::fused_linear`` with an
            activation, which wants a half to be a multiple of 8 rows.

    Attributes:
        handle: int64 [1], to be passed to ``chunkc::packed_linear``.
        numel: numbers in the weight, N K.

    Raises:
        ChunkcError: a compiler is there but could not build the library, or the library does not load.
        ValueError: a gated weight whose halves do not fit.
    """

    def __init__(self, weight: torch.Tensor, *, own: bool = True, consumed: bool = False, gated: bool = False) -> None:
        library = load()
        if library is not None:
            if not own or not _has_own(library, weight.dtype):
                _use_onednn(library)
            number = torch.ops.chunkc._pack_linear_weight(weight.detach(), own, consumed, gated)
            free = library.chunkc_free_linear_weight
        else:
            number, free = next(_numbers), _opaque.pop
            # no batch size: the layout must serve every number of rows
            _opaque[number] = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.handle, self.numel = torch.tensor([number]), weight.numel()
        weakref.finalize(self, free, number).atexit = False


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine runs packed linears of ``dtype``."""
    if not torch.backends.mkldnn.is_available() or dtype not in _DTYPES:
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def active_body(dtype: torch.dtype) -> str:
    """What serves packed linears of a ``dtype`` that ``can_pack``: ``"own"`` kernels or ``"onednn"``."""
    library = load()
    return "own" if library is not None and _has_own(library, dtype) else "onednn"


def load() -> ctypes.CDLL | None:
    """Make the C++ body serve; the library, built if need be, or None where there is no C++ compiler."""
    global _library, _tried
    if not _tried:
        with _lock:
            if not _tried:
                path = libraries.LINEAR.find_or_build()
                if path is not None:
                    _library = _load(str(path))
                _tried = True
    return _library


def _has_own(library: ctypes.CDLL, dtype: torch.dtype) -> bool:
    return dtype in _DTYPES and bool(library.chunkc_has_own_linear(dtype == torch.bfloat16))


def _use_onednn(library: ctypes.CDLL) -> None:
    """Give the library its calls of oneDNN, built if need be."""
    global _onednn
    if _onednn is None:
        with _lock:
            if _onednn is None:
                path = libraries.ONEDNN.find_or_build()
                if path is None:
                    raise ChunkcError(
                        "linears need a library of calls to oneDNN here, and there is no C++ compiler to build it"
                    )
                try:
                    _onednn = ctypes.CDLL(str(path))
                except OSError as error:
                    raise ChunkcError(f"The library of linears {path} does not load: {error}") from error
                _onednn.chunkc_onednn.restype = ctypes.c_void_p
                library.chunkc_use_onednn(ctypes.c_void_p(_onednn.chunkc_onednn()))


def _load(path: str) -> ctypes.CDLL:
    try:
        torch.ops.load_library(path)  # registers the body for CPU tensors
        library = ctypes.CDLL(path)
    except (OSError, RuntimeError) as error:
        raise ChunkcError(f"The library of linears {path} does not load: {error}") from error
    library.chunkc_free_linear_weight.argtypes = (ctypes.c_int64,)
    library.chunkc_free_linear_weight.restype = None
    library.chunkc_has_own_linear.argtypes = (ctypes.c_bool,)
    library.chunkc_has_own_linear.restype = ctypes.c_bool
    return library


def packed_linear(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [..., K] times the packed weight [N, K] transposed, plus bias [N] -> [..., N].

    Args:
        x, bias: of the weight's dtype.
        handle: the weight's.
        out_features: N.
        out_dtype: that of the result: x's (None), or float32, in which products are summed: then none is rounded, where
            own kernels serve. oneDNN's are rounded to x's dtype.

    Raises:
        RuntimeError: the handle's weight is gone.
    """
    result = torch.ops.mkldnn._linear_pointwise(x, _found(handle), bias, "none", [], "")
    return result if out_dtype is None else result.to(out_dtype)


def packed_rows(numbers: torch.Tensor, handle: torch.Tensor, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows ``numbers`` (int64 or int32, any shape [...]) of the packed weight [N, K] -> [..., K].

    Slow where oneDNN's layout must be undone: ask ``active_body`` before making use of it.

    Raises:
        RuntimeError: the handle's weight is gone.
        IndexError: there is no such row.
    """
    return torch.nn.functional.embedding(numbers, _found(handle).to_dense())


def _found(handle: torch.Tensor) -> torch.Tensor:
    weight = _opaque.get(int(handle))
    if weight is None:
        raise RuntimeError(f"the packed weight {int(handle)} is gone; keep its PackedWeight as long as the graph runs")
    return weight


def _shape(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features), dtype=out_dtype or x.dtype)


def _rows_shape(numbers: torch.Tensor, handle: torch.Tensor, in_features: int, dtype: torch.dtype) -> torch.Tensor:
    return numbers.new_empty((*numbers.shape, in_features), dtype=dtype)


_operators = torch.library.Library("chunkc", "FRAGMENT")
_operators.define(
    "packed_linear(Tensor x, Tensor handle, Tensor? bias, int out_features, ScalarType? out_dtype=None) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_operators.define(
    "packed_rows(Tensor numbers, Tensor handle, int in_features, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_operators.define("_pack_linear_weight(Tensor weight, bool own, bool consumed, bool gated) -> int")
# not for CPU alone: there the library's body takes its place
_operators.impl("packed_linear", packed_linear, "CompositeExplicitAutograd")
_operators.impl("packed_linear", _shape, "Meta")
_operators.impl("packed_rows", packed_rows, "CompositeExplicitAutograd")
_operators.impl("packed_rows", _rows_shape, "Meta")
