"""``chunkc::fused_linear``: a packed linear with what is done to its input and its output, in one go.

Before the product, the RMSNorm of its input, as Llama-like models write it; after it, an activation of gates that lets
the other half of the columns through, and the addition of a residual. The sums are rounded once, behind all that.

Its C++ body is that of ``chunkc::packed_linear`` (``cpu_linear.cpp``); the one below says what it means. A row's result
depends on no other row.
"""

from __future__ import annotations

import enum

import torch
from torch.nn import functional

from chunkc.kernels.packed_linear import packed_linear


class Activation(enum.IntEnum):
    """What gates go through; numbered as in ``cpu_linear_epilogue.h``."""

    NONE = 0
    SILU = 1
    GELU_TANH = 2

    def __call__(self, gates: torch.Tensor) -> torch.Tensor:
        """The activation of gates of any shape, in their dtype."""
        if self is Activation.SILU:
            return functional.silu(gates)
        return functional.gelu(gates, approximate="tanh") if self is Activation.GELU_TANH else gates


#: half the rows of a gated weight must be a multiple of this; as in ``cpu_linear_layout.h``
TURN = 8


def fused_linear(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    activation: int,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """residual + activation(gates) * rest, where [gates, rest] = norm(x) [..., K] times the weight [N, K] transposed.

    Args:
        x, bias: of the weight's dtype.
        handle: the weight's; of a weight packed as gated where there is an activation, else of another.
        out_features: columns of the result: N, or with an activation N / 2.
        norm_weight: [K], of the weight's dtype, or None for no norm.
        norm_eps: added to the mean square.
        activation: an ``Activation``; without one all columns are the product's.
        residual: [..., out_features], of the weight's dtype, or None.

    Raises:
        RuntimeError: the handle's weight is gone.
    """
    if norm_weight is not None:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm_eps)
        x = norm_weight * wide.to(x.dtype)
    kind = Activation(activation)
    if kind is Activation.NONE:
        result = packed_linear(x, handle, bias, out_features)
    else:
        gates, rest = packed_linear(x, handle, bias, 2 * out_features).chunk(2, dim=-1)
        result = kind(gates) * rest
    return result if residual is None else residual + result


def _shape(
    x: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    activation: int,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


_operators = torch.library.Library("chunkc", "FRAGMENT")
_operators.define(
    # an activation is a number, and all is said: what Inductor calls without Python has no text and no defaults
    "fused_linear(Tensor x, Tensor handle, Tensor? bias, int out_features, Tensor? norm_weight, float norm_eps, "
    "int activation, Tensor? residual) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
# not for CPU alone: there the library's body takes its place
_operators.impl("fused_linear", fused_linear, "CompositeExplicitAutograd")
_operators.impl("fused_linear", _shape, "Meta")
