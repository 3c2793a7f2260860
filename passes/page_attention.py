"""page_attention: ``chunkc::attention`` becomes ``chunkc::mixed_attention`` over this layer's pages.

Each attention call gets its own key and value page tensors as graph inputs, never a view of a stacked cache. Calls
are numbered in graph order (a model's own layer index is not unique). Calls of the same shape, window and chunk
share one task table, planned once a step.

before::

    %att = chunkc.attention(%q, %k, %v, None, None, None, 0.125, True, 0, 0, 0.0)   # [1, T, Hq, D] from [1, H, T, D]

after::

    %q1  = aten.reshape(aten.permute(%q, [0, 2, 1, 3]), [T, Hq, D])              # the same for k, v
    %mix = chunkc.mixed_attention(%q1, %k1, %v1, %k_pages_0, %v_pages_0, %q_offsets, %kv_lens, %page_table,
                                  %slot_mapping, %tasks_0, %merges_0, None, None, 0.125, 0, 0, 0.0,
                                  None, None)                                            # [T, Hq, D]
    %att = aten.unsqueeze(%mix, 0)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from chunkc.kernels.tasks import AttentionShape, Merge, Task
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import (
    add_placeholder,
    aten,
    call,
    is_call,
    new_size,
    placeholders,
    symbol_of,
    value,
)


@dataclass(frozen=True)
class PageAttention(GraphPass):
    """See the module's text. Ensures ``paged`` and fills ``context.attention_layers``."""

    name = "page_attention"
    requires = ("ragged", "attention_recognized")
    ensures = ("paged",)
    expects_matches = True

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Does not refuse: what it cannot take was refused by recognize_attention."""
        graph = graph_module.graph
        nodes = [node for node in graph.nodes if is_call(node, torch.ops.chunkc.attention)]
        if not nodes:
            return PassReport(0)
        metadata = _add_metadata(graph)
        pool = new_size(graph, "num_pages", 11), new_size(graph, "page_size", 5)
        plans: dict[AttentionShape, tuple[int, fx.Node, fx.Node]] = {}
        layers = []
        for index, node in enumerate(nodes):
            shape = _shape_of(node)
            if shape not in plans:
                plans[shape] = (len(plans), *_add_plan(graph, len(plans)))
            plan, tasks, merges = plans[shape]
            layer = AttentionLayer(index, shape, plan, value(node.args[1]).dtype)
            pages = _add_pages(graph, layer, pool)
            _replace(graph, node, pages, metadata, tasks, merges, shape)
            layers.append(layer)
        context.attention_layers[:] = layers
        return PassReport(len(nodes), notes=(f"{len(plans)} task table{'s' if len(plans) > 1 else ''} a step",))


def _shape_of(node: fx.Node) -> AttentionShape:
    q, k, v = (value(tensor).shape for tensor in node.args[:3])
    window, chunk = node.args[8:10]
    return AttentionShape(q[1], k[1], q[3], v[3], window=window, chunk=chunk)


def _add_metadata(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The inputs that describe the batch, as in ``chunkc.kernels.metadata.AttentionMetadata``."""
    tokens = value(placeholders(graph)["input_ids"]).shape[0]
    requests, pages = new_size(graph, "requests", 23), new_size(graph, "pages_per_request", 9)
    return (
        add_placeholder(graph, "q_offsets", (requests + 1,), torch.int32),
        add_placeholder(graph, "kv_lens", (requests,), torch.int32),
        add_placeholder(graph, "page_table", (requests, pages), torch.int32),
        add_placeholder(graph, "slot_mapping", (tokens,), torch.int64),
    )


def _add_plan(graph: fx.Graph, number: int) -> tuple[fx.Node, fx.Node]:
    tasks, merges = new_size(graph, "tasks", 17), new_size(graph, "merges", 19)
    return (
        add_placeholder(graph, f"tasks_{number}", (tasks, len(Task._fields)), torch.int32),
        add_placeholder(graph, f"merges_{number}", (merges, len(Merge._fields)), torch.int32),
    )


def _add_pages(graph: fx.Graph, layer: AttentionLayer, pool: tuple[torch.SymInt, torch.SymInt]) -> list[fx.Node]:
    num_pages, page_size = pool
    heads = layer.shape.num_kv_heads
    return [
        add_placeholder(graph, f"{kind}_pages_{layer.index}", (num_pages, heads, page_size, dim), layer.dtype)
        for kind, dim in (("k", layer.shape.qk_dim), ("v", layer.shape.v_dim))
    ]


def _replace(
    graph: fx.Graph,
    node: fx.Node,
    pages: list[fx.Node],
    metadata: tuple[fx.Node, ...],
    tasks: fx.Node,
    merges: fx.Node,
    shape: AttentionShape,
) -> None:
    sinks, alibi_slopes, scale, softcap = *node.args[4:7], node.args[10]
    with graph.inserting_before(node):
        rows = [token_rows(graph, tensor, node) for tensor in node.args[:3]]
        mixed = call(
            graph,
            torch.ops.chunkc.mixed_attention.default,
            *(*rows, *pages, *metadata, tasks, merges),
            *(sinks, alibi_slopes, scale, shape.window, shape.chunk, softcap, None, None),
            like=node,
        )
        result = call(graph, aten.unsqueeze.default, mixed, 0, like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def token_rows(graph: fx.Graph, tensor: fx.Node, like: fx.Node) -> fx.Node:
    """[1, H, T, D] -> [T, H, D]; a transpose that is there already is undone instead of doubled."""
    if is_call(tensor, aten.transpose) and {dim % 4 for dim in tensor.args[1:]} == {1, 2}:
        rows = tensor.args[0]
    else:
        rows = call(graph, aten.permute.default, tensor, [0, 2, 1, 3], like=like)
    return call(graph, aten.squeeze.dim, rows, 0, like=like)


@register_fact("paged")
def check_paged(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No unpaged attention is left; every mixed attention has page tensors of its own, which are inputs."""
    seen: set[fx.Node] = set()
    count = 0
    for node in graph_module.graph.nodes:
        require(not is_call(node, torch.ops.chunkc.attention), f"{node.name} is not paged")
        if is_call(node, torch.ops.chunkc.mixed_attention):
            count += 1
            for pages in node.args[3:5]:
                require(pages.op == "placeholder", f"the pages of {node.name} are not a graph input")
                require(pages not in seen, f"{node.name} shares its pages with another attention")
                seen.add(pages)
                require(len(pages.users) == 1, f"{pages.name} is used by more than its attention")
    require(count == len(context.attention_layers), "the graph's attention calls and the list of layers differ")
    symbols = {symbol_of(value(page).shape[0]) for page in seen}
    require(len(symbols) == 1, "page pools differ in their number of pages")
