"""split_layers: the graph falls into parts - what comes first, layer by layer, the head - cut where little is live.

Nothing is rewritten; nodes are put in order and each is told its part (``part_of``). Equal parts are then compiled
once (``chunkc.parts``), and a step can stop and go on between any two.

before::

    %x    = aten.embedding(%w, %ids)
    %norm = aten.mul(%w0, ...)                        # layer 0
    ...
    %cos  = aten.cos(...)                             # computed in layer 0, used in all
    %mix0 = chunkc.mixed_attention(...)
    ...
    %x1   = aten.add(...)
    %mix1 = chunkc.mixed_attention(...)

after::

    %cos  = aten.cos(...)                             # part 0: what several layers share, and the embedding
    %x    = aten.embedding(%w, %ids)
    %norm = aten.mul(%w0, ...)                        # part 1
    %mix0 = chunkc.mixed_attention(...)
    ...
    %x1   = aten.add(...)
    %mix1 = chunkc.mixed_attention(...)               # part 2

Between two attentions the cut is where the fewest bytes a token are live, the last such place: that is behind the
residual addition, before the next norm. The first cut is where the same is live as at the second, so that the first
layer is like the others. The last layer and the head are one part: rows without logits end inside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import is_call, value

_PART = "chunkc_part"


@dataclass(frozen=True)
class SplitLayers(GraphPass):
    """See the module's text. Ensures ``layers_split``; never refuses: a graph that cannot be cut is one part."""

    name = "split_layers"
    requires = ("linears_packed", "logits_gathered")
    ensures = ("layers_split",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Orders the nodes and marks them."""
        graph = graph_module.graph
        shared = _hoist_shared(graph)
        cuts = _cuts(list(graph.nodes), shared)
        part = 0
        for index, node in enumerate(graph.nodes):
            part += index in cuts
            node.meta[_PART] = part
        return PassReport(len(cuts) + 1, notes=(f"{len(cuts) + 1} parts, {len(shared)} nodes shared by layers",))


def part_of(node: fx.Node) -> int | None:
    """The part that a node was put in, or None for one that came later."""
    return node.meta.get(_PART)


def _is_value(node: fx.Node) -> bool:
    """Whether the node computes something that would have to be kept: no input, weight, size or output."""
    return node.op == "call_function" and not isinstance(value(node), (torch.SymInt, torch.SymFloat, int, float))


def _attentions(nodes: list[fx.Node]) -> list[int]:
    return [i for i, node in enumerate(nodes) if is_call(node, torch.ops.chunkc.mixed_attention)]


def _hoist_shared(graph: fx.Graph) -> set[fx.Node]:
    """Move what no attention precedes and several layers use (rotary tables) to the front, with all it is made of."""
    nodes = list(graph.nodes)
    attentions = [nodes[i] for i in _attentions(nodes)]
    behind = set(attentions)
    layer: dict[fx.Node, int] = {}  # how many attentions come before
    for node in nodes:
        layer[node] = layer.get(node.prev, 0) + (node.prev in attentions)
        if any(source in behind for source in node.all_input_nodes):
            behind.add(node)
    # used past one attention is the residual stream; past two, it serves several layers
    waiting = [
        node
        for node in nodes
        if _is_value(node) and node not in behind and any(layer[user] >= layer[node] + 2 for user in node.users)
    ]
    if not waiting:
        return set()
    shared: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in shared and node.op != "placeholder":
            shared.add(node)
            waiting.extend(node.all_input_nodes)
    anchor = next(node for node in nodes if node.op != "placeholder" and node not in shared)
    for node in [*(node for node in nodes if node.op == "placeholder"), *(node for node in nodes if node in shared)]:
        anchor.prepend(node)
    return shared


def _cuts(nodes: list[fx.Node], shared: set[fx.Node]) -> set[int]:
    """Indices of the nodes that begin a new part."""
    attentions = _attentions(nodes)
    live = list(_live_sets(nodes, shared))
    cuts = []
    for first, second in itertools.pairwise(attentions):
        places = [i for i in range(first + 1, second + 1) if _can_cross(live[i])]
        if places:
            cuts.append(min(reversed(places), key=lambda i: sum(map(_bytes_per_token, live[i]))))
    if cuts:
        like = _signature(live[cuts[0]])
        places = [i for i in range(1, attentions[0] + 1) if _can_cross(live[i]) and _signature(live[i]) == like]
        cuts += places[-1:]
    return set(cuts)


def _live_sets(nodes: list[fx.Node], shared: set[fx.Node]) -> Iterator[list[fx.Node]]:
    """For every index, the values computed before it and used at or behind it, but for the shared ones."""
    last_use: dict[fx.Node, int] = {}
    for index, node in enumerate(nodes):
        for source in node.all_input_nodes:
            last_use[source] = index
    live: list[fx.Node] = []
    for index, node in enumerate(nodes):
        live = [other for other in live if last_use[other] >= index]
        yield live
        if _is_value(node) and node not in shared and node in last_use:
            live = [*live, node]


def _can_cross(live: list[fx.Node]) -> bool:
    return all(isinstance(value(node), torch.Tensor) for node in live)


def _bytes_per_token(node: fx.Node) -> int:
    tensor = value(node)
    return math.prod(size for size in tensor.shape if isinstance(size, int)) * tensor.dtype.itemsize


def _signature(live: list[fx.Node]) -> list[Any]:
    return sorted((str(value(node).dtype), [str(size) for size in value(node).shape]) for node in live)


@register_fact("layers_split")
def check_layers_split(graph_module: fx.GraphModule, context: PassContext) -> None:
    """The marked nodes of a part lie side by side, in the order of the parts."""
    marks = [part_of(node) for node in graph_module.graph.nodes if part_of(node) is not None]
    require(bool(marks), "no node was told its part")
    require(marks == sorted(marks), "parts are interleaved")
