"""``chunkc::packed_linear``: a linear whose weight was laid out once for the CPU's matrix kernels.

A plain weight is reordered in every call, or multiplied by a slower kernel. Packed weights are opaque to the
compiler, so the graph does not hold them: it holds a *handle*, an int64 tensor of one element, like any weight, and
the operator finds the packed weight by the number in it. One compiled graph thus serves any weights.

The body is C++ (``cpu_linear.cpp``), built for a dtype when the first weight of it is packed. It has kernels of its own
for float32 where there is AVX512 and for bfloat16 where there is AVX512-BF16 but no AMX, and calls oneDNN elsewhere.
Without a compiler the body below calls oneDNN. The own kernels need no choice by measurement: for the linears of
SmolLM2-135M on a core of Zen 4 they take, in ms, with oneDNN's time (called from C++ too) behind the slash,

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
_libraries: dict[torch.dtype, ctypes.CDLL | None] = {}  # None: no compiler; the first one registered the operators
_onednn: ctypes.CDLL | None = None
_with_onednn: set[torch.dtype] = set()  # of libraries that have its calls

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
        library = load(weight.dtype)
        if library is not None:
            if not own or not library.chunkc_has_own_linear():
                _use_onednn(library, weight.dtype)
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
    library = load(dtype)
    return "own" if library is not None and library.chunkc_has_own_linear() else "onednn"


def load(dtype: torch.dtype) -> ctypes.CDLL | None:
    """Make the C++ body serve weights of a dtype; the library, built if need be, or None without a C++ compiler.

    Raises:
        ChunkcError: a compiler is there but could not build the library, or the library does not load, or there is no
            compiler, and another dtype's library is loaded.
        ValueError: linears of such a dtype are not packed.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"linears are packed for float32 and bfloat16, not {dtype}")
    if dtype not in _libraries:
        with _lock:
            if dtype not in _libraries:
                path = libraries.LINEAR[dtype].find_or_build()
                if path is None and any(library is not None for library in _libraries.values()):
                    raise ChunkcError(f"there is no C++ compiler to build linears for {dtype}, as there was before")
                _libraries[dtype] = None if path is None else _load(str(path))
    return _libraries[dtype]


def _use_onednn(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    """Give the library of a dtype its calls of oneDNN, built if need be."""
    global _onednn
    if dtype not in _with_onednn:
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
            _with_onednn.add(dtype)


def _load(path: str) -> ctypes.CDLL:
    """Load a library, and have the first one that was loaded hand calls on to it."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise ChunkcError(f"The library of linears {path} does not load: {error}") from error
    library.chunkc_free_linear_weight.argtypes = (ctypes.c_int64,)
    library.chunkc_free_linear_weight.restype = None
    library.chunkc_has_own_linear.restype = library.chunkc_register_linears.restype = ctypes.c_bool
    library.chunkc_linear_bodies.restype = ctypes.c_void_p
    first = next(filter(None, _libraries.values()), library)
    place, bodies = library.chunkc_linear_place(), ctypes.c_void_p(library.chunkc_linear_bodies())
    first.chunkc_serve_linears(ctypes.c_int(place), bodies)
    if first is library and not library.chunkc_register_linears():
        raise ChunkcError(f"The library of linears {path} could not register its operators")
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
