"""``chunkc::linear_argmax``: the largest of each row's sums of a packed linear, and where it is.

Greedy decoding wants no more of the LM head. Its body (``cpu_linear.cpp``) never holds the rows of logits, float32
numbers by the vocabulary, where own kernels multiply; the one below says what it means.
"""

from __future__ import annotations

import torch

from chunkc.kernels.fused_linear import Activation, fused_linear
from chunkc.kernels.packed_linear import packed_linear


def linear_rows(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> torch.Tensor:
    """The sums themselves, float32 [..., N]: norm(x) [..., K] times the weight [N, K] transposed, plus bias.

    Args:
        x, bias: of the weight's dtype.
        handle: the weight's.
        out_features: N.
        norm_weight, norm_eps: see ``fused_linear``. With a norm the weight must be float32: it has none whose result is
            wider than its weight.

    Raises:
        RuntimeError: the handle's weight is gone.
    """
    if norm_weight is None:
        return torch.ops.chunkc.packed_linear(x, handle, bias, out_features, torch.float32)
    around = (norm_weight, norm_eps, int(Activation.NONE), None)
    return torch.ops.chunkc.fused_linear(x, handle, bias, out_features, *around)


def linear_argmax(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each row's largest sum (the lowest of equals; of a NaN, where there is one), and that sum.

    Args:
        x, handle, bias, out_features, norm_weight, norm_eps: see ``linear_rows``.

    Returns:
        int64 [...] and float32 [...].

    Raises:
        RuntimeError: the handle's weight is gone.
    """
    if norm_weight is None:
        sums = packed_linear(x, handle, bias, out_features, torch.float32)
    else:
        sums = fused_linear(x, handle, bias, out_features, norm_weight, norm_eps, int(Activation.NONE), None).float()
    columns = sums.argmax(-1)
    return columns, sums.gather(-1, columns[..., None])[..., 0]


def _shape(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = x.shape[:-1]
    return x.new_empty(shape, dtype=torch.int64), x.new_empty(shape, dtype=torch.float32)


_operators = torch.library.Library("chunkc", "FRAGMENT")
_operators.define(
    "linear_argmax(Tensor x, Tensor handle, Tensor? bias, int out_features, Tensor? norm_weight, float norm_eps) "
    "-> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
# not for CPU alone: there the library's body takes its place
_operators.impl("linear_argmax", linear_argmax, "CompositeExplicitAutograd")
_operators.impl("linear_argmax", _shape, "Meta")
