"""fuse_norms: the RMSNorm before a linear is computed where its rows are multiplied.

before::

    %wide  = aten._to_copy(%x, dtype=float32)                    # half precision only
    %mean  = aten.mean(aten.pow(%wide, 2), [-1], True)
    %norm  = aten.mul(%wide, aten.rsqrt(aten.add(%mean, 1e-05)))
    %h     = aten.mul(%norm_weight, aten._to_copy(%norm, dtype=bfloat16))
    %qkv   = chunkc.packed_linear(%h, %packed_linear_0, None, 960)

after::

    %qkv   = chunkc.fused_linear(%x, %packed_linear_0, None, 960, %norm_weight, 1e-05, NONE, None)

Only this norm is known, which Llama and its like have: it rounds before the weight is multiplied. Left alone: a norm
that anything but one linear reads, over another dimension than the linear's input, of another dtype than its weight,
and with a weight that is computed (one plus a parameter); and, said, all of them where oneDNN multiplies.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, is_call, module_path, value
from chunkc.passes.linear_calls import LinearCall, linear_call, why_not_ours


@dataclass(frozen=True)
class FuseNorms(GraphPass):
    """See the module's text. Ensures ``norms_fused``."""

    name = "fuse_norms"
    requires = ("linears_packed", "logits_wide")
    ensures = ("norms_fused",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Never refuses."""
        graph = graph_module.graph
        skipped: list[Skipped] = []
        count = 0
        for node in list(graph.nodes):
            linear = linear_call(node)
            norm = None if linear is None else _norm_before(linear, node)
            if norm is None:
                continue
            why = why_not_ours(value(linear.x).dtype)
            if why:
                skipped.append(Skipped(module_path(linear.x) or linear.x.name, why))
                continue
            fused = dataclasses.replace(linear, x=norm.x, norm_weight=norm.weight, norm_eps=norm.eps)
            fused.replace(node)
            count += 1
        graph.eliminate_dead_code()
        return PassReport(count, tuple(skipped))


@dataclass(frozen=True)
class _Norm:
    """weight [K] * x / root(mean square of x [..., K] + eps)."""

    x: fx.Node
    weight: fx.Node
    eps: float


def _norm_before(linear: LinearCall, node: fx.Node) -> _Norm | None:
    """The norm whose result ``node`` multiplies, and which nothing else reads."""
    if linear.norm_weight is not None or linear.residual is linear.x or linear.x.users.keys() != {node}:
        return None
    if not is_call(linear.x, aten.mul.Tensor):
        return None
    for weight, scaled in _both_ways(linear.x):
        found = _divided(scaled)
        if found is None or not isinstance(weight, fx.Node) or weight.op != "get_attr":
            continue
        norm = _Norm(found[0], weight, found[1])
        same = {value(each).dtype for each in (linear.x, norm.x, weight, scaled)}
        if len(same) == 1 and tuple(value(weight).shape) == (value(norm.x).shape[-1],):
            return norm
    return None


def _divided(node: fx.Node) -> tuple[fx.Node, float] | None:
    """(x, eps), where the node is x over the root of its mean square plus eps, rounded to x's dtype."""
    product = node.args[0] if is_call(node, aten._to_copy) else node
    if not is_call(product, aten.mul.Tensor) or any(len(each.users) > 1 for each in (node, product)):
        return None
    for wide, root in _both_ways(product):
        eps = _eps_of_root(wide, root)
        if eps is not None and value(wide).dtype is torch.float32:
            return (wide.args[0] if is_call(wide, aten._to_copy) else wide), eps
    return None


def _eps_of_root(wide: fx.Node, root: fx.Node) -> float | None:
    """Eps, where ``root`` is one over the root of the mean of the last dimension's squares, plus eps."""
    expected = (aten.rsqrt, aten.add.Tensor, aten.mean.dim, aten.pow.Tensor_Scalar)
    chain, node = [], root
    for operator in expected:
        if not is_call(node, operator) or node.kwargs or len(node.users) > 1:
            return None
        chain.append(node)
        node = node.args[0]
    _, add, mean, power = chain
    last = value(wide).dim() - 1
    if node is not wide or len(add.args) != 2 or not isinstance(add.args[1], (int, float)) or power.args[1] != 2:
        return None
    keeps = len(mean.args) > 2 and mean.args[2]
    return float(add.args[1]) if keeps and [dim % (last + 1) for dim in mean.args[1]] == [last] else None


def _both_ways(product: fx.Node) -> tuple[tuple[fx.Node, fx.Node], tuple[fx.Node, fx.Node]]:
    first, second = product.args
    return (first, second), (second, first)


@register_fact("norms_fused")
def check_norms_fused(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No norm is left that could be computed where its linear is."""
    for node in graph_module.graph.nodes:
        linear = linear_call(node)
        if linear is None or _norm_before(linear, node) is None:
            continue
        require(why_not_ours(value(linear.x).dtype) is not None, f"the norm before {node.name} is not fused")
