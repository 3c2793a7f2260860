"""``chunkc::packed_linear``: a linear whose weight was laid out once for the CPU's matrix kernels (oneDNN).

A plain weight is reordered in every call, or multiplied by a slower kernel. Packed weights are opaque to the
compiler, so the graph does not hold them: it holds a *handle*, an int64 tensor of one element, like any weight, and
the operator finds the packed weight by the number in it. One compiled graph thus serves any weights.
"""

from __future__ import annotations

import itertools
import weakref

import torch

#: dtypes worth packing; the CPU must have instructions for the latter
_DTYPES = (torch.float32, torch.bfloat16)

_numbers = itertools.count()
_packed: weakref.WeakValueDictionary[int, PackedWeight] = weakref.WeakValueDictionary()


class PackedWeight:
    """A weight [N, K] in oneDNN's layout. It lives as long as somebody holds this object, not the handle.

    Args:
        weight: [N, K], of a dtype that ``can_pack``.

    Attributes:
        handle: int64 [1], to be passed to ``chunkc::packed_linear``.
        tensor: the packed weight; opaque.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        number = next(_numbers)
        # no batch size: the layout must serve every number of rows
        self.tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.handle = torch.tensor([number])
        _packed[number] = self


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this machine runs packed linears of ``dtype``."""
    if not torch.backends.mkldnn.is_available() or dtype not in _DTYPES:
        return False
    return dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def packed_linear(x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """x [..., K] times the packed weight [N, K] transposed, plus bias [N] -> [..., N], in x's dtype.

    Raises:
        RuntimeError: the handle's weight is gone.
    """
    weight = _packed.get(int(handle))
    if weight is None:
        raise RuntimeError(f"the packed weight {int(handle)} is gone; keep its PackedWeight as long as the graph runs")
    return torch.ops.mkldnn._linear_pointwise(x, weight.tensor, bias, "none", [], "")


def _shape(x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


_library = torch.library.Library("chunkc", "FRAGMENT")
_library.define(
    "packed_linear(Tensor x, Tensor handle, Tensor? bias, int out_features) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("packed_linear", packed_linear, "CPU")
_library.impl("packed_linear", _shape, "Meta")
