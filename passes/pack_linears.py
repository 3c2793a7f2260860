"""pack_linears: linears read weights that were laid out once for the CPU's matrix kernels.

before::

    %qkv = aten.linear(%h, %fused_linear_0_weight)                     # [1, T, 960]

after::

    %qkv = chunkc.packed_linear(%h, %packed_linear_0, None, 960)       # the weight is behind a handle

``addmm`` with a weight [K, N] (GPT-2's Conv1D) is packed too. Left alone: a dtype for which the machine has no packed
kernel. An embedding that shares its weight with the LM head reads the rows of the packed one, where they can be read::

    %x = aten.embedding(%weight, %input_ids)
    %x = chunkc.packed_rows(%input_ids, %packed_linear_120, 576, float32)

A weight that is used otherwise too is packed for the linear and kept for the other use.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx

from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, call, is_call, module_path, value
from chunkc.passes.made_tensors import Packed
from chunkc.passes.register_made import register
from chunkc.passes.unused import drop_unused_tensors


@dataclass(frozen=True)
class PackLinears(GraphPass):
    """See the module's text. Ensures ``linears_packed``."""

    name = "pack_linears"
    requires = ("linears_fused", "logits_gathered")
    ensures = ("linears_packed",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Never refuses. The packed weights are appended to ``context.resources``; keep them while the graph runs."""
        graph = graph_module.graph
        packed: dict[str, str] = {}
        skipped: list[Skipped] = []
        count = 0
        for node in list(graph.nodes):
            linear = _as_linear(node)
            if linear is None:
                continue
            why = _why_not(linear)
            if why:
                skipped.append(Skipped(module_path(node) or node.name, why))
                continue
            key = f"{linear.weight.target}{'.T' if linear.transposed else ''}"
            if key not in packed:
                packed[key] = _pack(graph_module, linear, f"packed_linear_{len(packed)}", context)
            with graph.inserting_before(node):
                handle = graph.get_attr(packed[key])
                arguments = (linear.x, handle, linear.bias, value(node).shape[-1])
                result = call(graph, torch.ops.chunkc.packed_linear.default, *arguments, like=node)
            node.replace_all_uses_with(result)
            graph.erase_node(node)
            count += 1
        _read_packed_rows(graph, packed)
        graph.eliminate_dead_code()
        drop_unused_tensors(graph_module)
        return PassReport(count, tuple(skipped))


@dataclass(frozen=True)
class _Linear:
    """x times a weight [N, K], or [K, N] where ``transposed``, plus bias."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool


def _as_linear(node: fx.Node) -> _Linear | None:
    if is_call(node, aten.linear):
        bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
        return _Linear(node.args[0], node.args[1], bias, transposed=False)
    plain = not node.kwargs and len(node.args) == 3
    if is_call(node, aten.addmm) and plain and value(node.args[0]).dim() == 1:
        return _Linear(node.args[1], node.args[2], node.args[0], transposed=True)
    return None


def _why_not(linear: _Linear) -> str | None:
    if linear.weight.op != "get_attr":
        return "its weight is computed"
    dtype = value(linear.weight).dtype
    return None if can_pack(dtype) else f"no packed kernel for {dtype} on this machine"


def _pack(graph_module: fx.GraphModule, linear: _Linear, name: str, context: PassContext) -> str:
    register(graph_module, name, Packed(linear.weight.target, linear.transposed), context)
    return name


def _read_packed_rows(graph: fx.Graph, packed: dict[str, str]) -> None:
    """Have embeddings read packed weights; only of those which nothing else reads in plain."""
    readers: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="get_attr"):
        if node.target in packed and active_body(value(node).dtype) == "own":
            readers[node.target] += node.users
    for weight, nodes in readers.items():
        if not all(is_call(node, aten.embedding) and node.args[1].op != "get_attr" for node in nodes):
            continue
        for node in nodes:
            with graph.inserting_before(node):
                arguments = (node.args[1], graph.get_attr(packed[weight]), value(node).shape[-1], value(node).dtype)
                rows = call(graph, torch.ops.chunkc.packed_rows.default, *arguments, like=node)
            node.replace_all_uses_with(rows)
            graph.erase_node(node)


@register_fact("linears_packed")
def check_linears_packed(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No linear is left whose weight could be packed."""
    for node in graph_module.graph.nodes:
        linear = _as_linear(node)
        require(linear is None or _why_not(linear) is not None, f"{node.name} is not packed")
