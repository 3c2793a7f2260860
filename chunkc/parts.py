"""A graph cut into its parts: small graphs of their own, and what goes into each.

Every part takes its weights, its pages and what earlier parts computed as arguments, in the order in which its nodes
ask for them. So two layers that do the same become the same graph, as ``chunkc.structure`` can tell.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from chunkc.passes.fx_tools import aten, output_node, placeholders, symbol_of, value
from chunkc.passes.split_layers import part_of
from chunkc.program import WEIGHT

#: before the names of computed values, which inputs' names lack, as they lack WEIGHT
COMPUTED = "%"


@dataclass(frozen=True)
class Part:
    """A piece of a graph.

    Attributes:
        graph_module: takes ``inputs`` in order, returns a tuple of ``outputs``; it has no attributes.
        inputs: names: of the whole graph's inputs; of its attributes, behind ``weight:``; of earlier outputs.
        outputs: names, behind ``%``, of the values that later parts or the caller need.
    """

    graph_module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def cut(graph_module: fx.GraphModule) -> list[Part]:
    """Cut a graph where split_layers said, or keep it whole where that did not run.

    Args:
        graph_module: every node has a fake value. It is not changed.
    """
    graph = graph_module.graph
    numbers = _part_numbers(graph)
    last_use = {source: number for node, number in numbers.items() for source in node.all_input_nodes}
    last_use[output_node(graph)] = len(numbers)  # behind all parts
    inputs = list(placeholders(graph).values())
    parts = []
    for number, group in itertools.groupby(numbers, key=numbers.__getitem__):
        nodes = [node for node in group if not is_size(node)]
        if nodes:
            outputs = [node for node in nodes if last_use.get(node, number) > number]
            parts.append(_extract(nodes, outputs, inputs))
    return parts


def name_of(node: fx.Node) -> str:
    """What ``Part`` calls the value of a node of the whole graph."""
    if node.op == "placeholder":
        return str(node.target)
    return f"{WEIGHT}{node.target}" if node.op == "get_attr" else f"{COMPUTED}{node.name}"


def is_size(node: fx.Node) -> bool:
    """Whether the node computes a size; sizes do not go from part to part but are asked for anew."""
    return node.op == "call_function" and isinstance(value(node), (int, float, torch.SymInt, torch.SymFloat))


def _part_numbers(graph: fx.Graph) -> dict[fx.Node, int]:
    """Every computing node's part; a node that was made after the cuts belongs where it stands."""
    numbers = {}
    current = 0
    for node in graph.nodes:
        if node.op == "call_function":
            current = max(current, part_of(node) or 0)
            numbers[node] = current
    return numbers


def _extract(nodes: list[fx.Node], outputs: list[fx.Node], inputs: list[fx.Node]) -> Part:
    order = _with_sizes(nodes, inputs)
    inside = set(order)
    graph = fx.Graph()
    copies: dict[str, fx.Node] = {}
    for node in order:
        for source in _sources(node, inputs):
            if source not in inside and name_of(source) not in copies:
                copy = graph.placeholder(f"input_{len(copies)}")
                copy.meta["val"] = _fresh(value(source))
                copies[name_of(source)] = copy
    names = tuple(copies)
    for node in order:
        origin = _origin(node, inputs)
        if origin is not None:
            copy = graph.call_function(aten.sym_size.int, (copies[name_of(origin[0])], origin[1]))
        else:
            copy = graph.node_copy(node, lambda source: copies[name_of(source)])
        copy.meta = {key: node.meta[key] for key in ("val", "nn_module_stack", "stack_trace") if key in node.meta}
        copies[name_of(node)] = copy
    result = tuple(_detached(graph, copies[name_of(node)]) for node in outputs)
    graph.output(result).meta["val"] = tuple(map(value, result))
    return Part(fx.GraphModule({}, graph), names, tuple(map(name_of, outputs)))


def _fresh(fake: FakeTensor) -> FakeTensor:
    """A value of its own for an input: several of one part may share theirs, and Inductor would take them for one."""
    with fake.fake_mode:
        return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """A value that is no view of an input, which compiled graphs do not return: where it is one, a copy of it."""
    root = node
    while root.op == "call_function" and (root.target is operator.getitem or _is_view(root)):
        root = root.all_input_nodes[0]
    if root.op != "placeholder":
        return node
    copy = graph.call_function(aten.clone.default, (node,), {"memory_format": torch.contiguous_format})
    with value(node).fake_mode:
        copy.meta["val"] = torch.empty(value(node).shape, dtype=value(node).dtype)
    return copy


def _is_view(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)


def _with_sizes(nodes: list[fx.Node], inputs: list[fx.Node]) -> list[fx.Node]:
    """The nodes, with the sizes they need, wherever those were computed, before their first use."""
    order: dict[fx.Node, None] = {}

    def add(node: fx.Node) -> None:
        for source in _sources(node, inputs):
            if is_size(source):
                add(source)
        order[node] = None

    for node in nodes:
        add(node)
    return list(order)


def _sources(node: fx.Node, inputs: list[fx.Node]) -> list[fx.Node]:
    origin = _origin(node, inputs)
    return [origin[0]] if origin is not None else node.all_input_nodes


def _origin(node: fx.Node, inputs: list[fx.Node]) -> tuple[fx.Node, int] | None:
    """For a size: an input of the whole graph and its dimension of that size, so that parts ask alike."""
    symbol = symbol_of(value(node)) if is_size(node) else None
    if symbol is None:
        return None
    for source in inputs:
        for dim, size in enumerate(value(source).shape):
            if symbol_of(size) == symbol:
                return source, dim
    return None
