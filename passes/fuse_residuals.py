"""fuse_residuals: a linear's result is added to the residual before it is rounded, where it is made.

before::

    %o   = chunkc.packed_linear(%att, %packed_linear_1, None, 576)                          # [1, T, 576]
    %sum = aten.add(%h, %o)

after::

    %sum = chunkc.fused_linear(%att, %packed_linear_1, None, 576, None, 0.0, NONE, %h)

Half precision rounds once where it rounded twice. Left alone: a result that something else reads too, and sums that
broadcast, scale or change the dtype; and, said, all of them where oneDNN multiplies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, is_call, mark_absorbed, module_path, same_size, value
from chunkc.passes.linear_calls import LinearCall, linear_call, why_not_ours


@dataclass(frozen=True)
class FuseResiduals(GraphPass):
    """See the module's text. Ensures ``residuals_fused``."""

    name = "fuse_residuals"
    requires = ("linears_packed", "logits_wide")
    ensures = ("residuals_fused",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Never refuses."""
        graph = graph_module.graph
        skipped: list[Skipped] = []
        count = 0
        for node in list(graph.nodes):
            found = _residual(node)
            if found is None:
                continue
            why = why_not_ours(value(node).dtype)
            if why:
                skipped.append(Skipped(module_path(found.linear) or found.linear.name, why))
                continue
            mark_absorbed(dataclasses.replace(found.call, residual=found.residual).replace(node), found.linear)
            graph.erase_node(found.linear)
            count += 1
        return PassReport(count, tuple(skipped))


@dataclass(frozen=True)
class _Residual:
    """A sum's operands: a linear that nothing else reads, and what its result is added to."""

    linear: fx.Node
    call: LinearCall
    residual: fx.Node


def _residual(node: fx.Node) -> _Residual | None:
    if not is_call(node, aten.add.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    for linear, other in _operands(node):
        found = linear_call(linear)
        if found is not None and found.residual is None and linear.users.keys() == {node} and _is_alike(linear, other):
            return _Residual(linear, found, other)
    return None


def _operands(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The two operands of a sum both ways round, where they are two tensors; the second one is a linear most often."""
    first, second = node.args
    if isinstance(first, fx.Node) and isinstance(second, fx.Node) and first is not second:
        if isinstance(value(first), torch.Tensor) and isinstance(value(second), torch.Tensor):
            yield from ((second, first), (first, second))


def _is_alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = value(one), value(other)
    return a.dtype is b.dtype and a.dim() == b.dim() and all(map(same_size, a.shape, b.shape))


@register_fact("residuals_fused")
def check_residuals_fused(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No residual is left that could be added where the linear is made."""
    for node in graph_module.graph.nodes:
        require(_residual(node) is None or why_not_ours(value(node).dtype) is not None, f"{node.name} is not fused")
