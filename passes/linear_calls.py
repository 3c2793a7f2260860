"""Linears on packed weights, as the passes that fuse what is around them read and write them.

A ``chunkc::packed_linear`` is a ``chunkc::fused_linear`` with nothing around it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import fx

from chunkc.kernels.fused_linear import Activation
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.passes.fx_tools import call, is_call, value

PACKED, FUSED = torch.ops.chunkc.packed_linear, torch.ops.chunkc.fused_linear


@dataclass(frozen=True)
class LinearCall:
    """The operands of a ``chunkc::fused_linear``, in its order."""

    x: fx.Node
    handle: fx.Node
    bias: fx.Node | None
    out_features: int
    norm_weight: fx.Node | None = None
    norm_eps: float = 0.0
    activation: int = int(Activation.NONE)
    residual: fx.Node | None = None

    def replace(self, node: fx.Node) -> fx.Node:
        """Put the call where ``node`` stands, which computes the same, and have it read in its place."""
        graph = node.graph
        with graph.inserting_before(node):
            operands = (getattr(self, field.name) for field in dataclasses.fields(self))
            result = call(graph, FUSED.default, *operands, like=node)
        result.meta["val"] = value(node)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
        return result


def linear_call(node: fx.Node) -> LinearCall | None:
    """What a node calls, or None where it is no linear on a packed weight, or one whose result is of another dtype."""
    if is_call(node, FUSED):
        return LinearCall(*node.args)
    if is_call(node, PACKED) and value(node).dtype is value(node.args[0]).dtype:
        return LinearCall(*node.args[:4])
    return None


def why_not_ours(dtype: torch.dtype) -> str | None:
    """Why linears of this dtype are left alone: only kernels of ours fuse anything. None where they serve them here."""
    ours = can_pack(dtype) and active_body(dtype) == "own"
    return None if ours else f"no kernel of ours multiplies {dtype} on this machine"
