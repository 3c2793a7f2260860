"""fuse_linears: linears that read the same input become one, whose weights are concatenated once.

q, k and v projections become one product, gate and up another. The parts are views of the result.

before::

    %q = aten.linear(%h, %wq)            # [1, T, 576]
    %k = aten.linear(%h, %wk)            # [1, T, 192]
    %v = aten.linear(%h, %wv)            # [1, T, 192]

after::

    %qkv   = aten.linear(%h, %fused_linear_0_weight)                  # [1, T, 960]
    %parts = aten.split_with_sizes(%qkv, [576, 192, 192], -1)
    %q, %k, %v = getitem(%parts, 0), getitem(%parts, 1), getitem(%parts, 2)

Left alone: a weight that something else uses too (tied embeddings would be copied), and weights of different
dtype. The graph drops the single weights; no copy of them is kept here.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, call, is_call, module_path, value
from chunkc.passes.made_tensors import Concatenated
from chunkc.passes.register_made import register
from chunkc.passes.unused import drop_unused_tensors

_PREFIX = "fused_linear"


@dataclass(frozen=True)
class FuseLinears(GraphPass):
    """See the module's text. Ensures ``linears_fused``."""

    name = "fuse_linears"
    requires = ("ragged",)
    ensures = ("linears_fused",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Never refuses: what cannot be fused is left as it is, and said."""
        groups, skipped = _groups(graph_module)
        for number, group in enumerate(groups):
            _fuse(graph_module, group, f"{_PREFIX}_{number}", context)
        graph_module.graph.eliminate_dead_code()
        drop_unused_tensors(graph_module)
        return PassReport(len(groups), tuple(skipped))


def _groups(graph_module: fx.GraphModule) -> tuple[list[list[fx.Node]], list[Skipped]]:
    """Linears to fuse, grouped by the input they read, in graph order."""
    by_input: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph_module.graph.nodes:
        if is_call(node, aten.linear):
            by_input[node.args[0]].append(node)
    groups, skipped = [], []
    for linears in by_input.values():
        if len(linears) < 2:
            continue
        alone = {node: _why_alone(node) for node in linears}
        skipped += [Skipped(module_path(node) or node.name, why) for node, why in alone.items() if why]
        by_dtype: dict[torch.dtype, list[fx.Node]] = defaultdict(list)
        for node in linears:
            if not alone[node]:
                by_dtype[value(node.args[1]).dtype].append(node)
        groups += [same for same in by_dtype.values() if len(same) > 1]
    return groups, skipped


def _why_alone(node: fx.Node) -> str | None:
    for weight in node.args[1:]:
        if weight is None:
            continue
        if weight.op != "get_attr":
            return "its weight is computed"
        if len(weight.users) > 1:
            return "its weight is used elsewhere too"
    return None


def _bias(node: fx.Node) -> fx.Node | None:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _fuse(graph_module: fx.GraphModule, linears: list[fx.Node], name: str, context: PassContext) -> None:
    graph = graph_module.graph
    sizes = [value(node.args[1]).shape[0] for node in linears]
    has_bias = any(_bias(node) is not None for node in linears)
    weights = Concatenated(tuple(node.args[1].target for node in linears))
    register(graph_module, f"{name}_weight", weights, context)
    if has_bias:
        biases = [_bias(node) for node in linears]
        parts = [size if bias is None else bias.target for bias, size in zip(biases, sizes, strict=True)]
        register(graph_module, f"{name}_bias", Concatenated(tuple(parts)), context)

    first = linears[0]
    with graph.inserting_before(first):
        arguments = [first.args[0], graph.get_attr(f"{name}_weight")]
        if has_bias:
            arguments.append(graph.get_attr(f"{name}_bias"))
        whole = call(graph, aten.linear.default, *arguments, like=first)
        parts = call(graph, aten.split_with_sizes.default, whole, sizes, -1, like=first)
        for index, node in enumerate(linears):
            part = call(graph, operator.getitem, parts, index, like=node)
            node.replace_all_uses_with(part)
    for node in linears:
        graph.erase_node(node)


@register_fact("linears_fused")
def check_linears_fused(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No two linears that could be fused read the same input."""
    groups, _ = _groups(graph_module)
    require(not groups, f"{', '.join(n.name for n in groups[0]) if groups else ''} read the same input")
