"""Which masks may be judged by samples, and at which positions to look.

An op is *index based* where entry (i, j) of its result depends on the entries (i, j) of its inputs alone. In a mask
made of such ops the ranges over all tokens may be replaced by a few sampled positions, and the result holds the
mask's entries at these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from chunkc.passes.fx_tools import aten, is_call, symbol_of, value
from chunkc.passes.size_arguments import is_size

#: operators that take a shape, or of a tensor its shape alone
SHAPE_ONLY = (
    aten.ones_like,
    aten.zeros_like,
    aten.full_like,
    aten.new_ones,
    aten.new_zeros,
    aten.new_full,
    aten.full,
    aten.ones,
    aten.zeros,
    aten.scalar_tensor,
)
_INDEX_BASED = (
    aten.arange,
    aten.unsqueeze,
    aten.squeeze,
    aten.expand,
    aten.permute,
    aten.transpose,
    *SHAPE_ONLY,
    aten._to_copy,
    aten.__and__,
    aten.__or__,
    aten.where,
    aten.floor_divide,
)


def ancestors(node: fx.Node) -> list[fx.Node]:
    """``node`` and all it is computed from, in graph order."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            waiting.extend(current.all_input_nodes)
    return [other for other in node.graph.nodes if other in seen]


def is_token_range(node: fx.Node) -> bool:
    """Whether this is ``arange(S)``: the indices of all tokens."""
    if not is_call(node, aten.arange):
        return False
    size = symbol_of(value(node).shape[0])
    if size is None or not size.is_Symbol:
        return False
    start_is_zero = node.target == aten.arange.default or node.args[0] == 0
    step_is_one = node.target != aten.arange.start_step or len(node.args) < 3 or node.args[2] == 1
    return start_is_zero and step_is_one


def _index_based(node: fx.Node) -> bool:
    """Whether entry (i, j) of what this computes depends on nothing but the entries (i, j) of its inputs."""
    if node.op in ("placeholder", "get_attr") or is_size(node):
        return True
    if is_call(node, aten.arange):
        return is_token_range(node) or symbol_of(value(node).shape[0]) is None
    if is_call(node, aten.index):
        return dynamic_dims(node.args[0]) == 0  # a table, looked up anew at every place
    if is_call(node, aten.select, aten.slice):  # across the sequence: one row of a batch, some of the heads
        dim = node.args[1] if len(node.args) > 1 else 0
        return symbol_of(value(node.args[0]).shape[dim]) is None
    if is_call(node, aten.reshape):
        return _without_ones(node.args[0]) == _without_ones(node)
    return is_call(node, *_INDEX_BASED) or torch.Tag.pointwise in getattr(node.target, "tags", ())


def whole_nodes(program: list[fx.Node]) -> set[fx.Node] | None:
    """What must be computed for the whole sequence although only samples of the mask are looked at.

    Usually nothing. A model that detects packed sequences by running over the positions needs them whole; the
    result is then looked up at the sampled places. None where sampling is not sound.
    """
    running: set[fx.Node] = set()  # depends on positions and on no index range
    for node in program:
        if node.op == "placeholder" and node.target != "input_ids":
            running.add(node)
        elif node.all_input_nodes and all(
            other in running or (other.op == "get_attr" or _constant(other)) for other in node.all_input_nodes
        ):
            if any(other in running for other in node.all_input_nodes) and not is_size(node):
                running.add(node)
    looked_up = {node.args[0] for node in program if is_call(node, aten.index)}
    if all(_index_based(node) for node in program if node in running) and not looked_up & running:
        return set() if all(_index_based(node) for node in program) else None
    for node in program:
        tensors = [other for other in node.all_input_nodes if not is_size(other)]
        if node in running:
            if dynamic_dims(node) > 1 or len(tensors) != len(node.all_input_nodes):
                return None
        elif is_size(node):
            continue
        elif is_call(node, aten.index) and node.args[0] in running:
            if any(other in running for other in tensors if other is not node.args[0]):
                return None
        elif not _index_based(node) or any(other in running for other in tensors):
            return None
    return running


def _constant(node: fx.Node) -> bool:
    """Whether a node computes the same whatever the sequence is."""
    return not any(other.op == "placeholder" or is_size(other) or dynamic_dims(other) for other in ancestors(node))


def dynamic_dims(node: fx.Node) -> int:
    """How many dimensions of what a node computes depend on the number of tokens."""
    tensor = value(node)
    return sum(symbol_of(size) is not None for size in tensor.shape) if isinstance(tensor, torch.Tensor) else 0


def _without_ones(node: fx.Node) -> list[Any]:
    sizes = [symbol_of(size) if symbol_of(size) is not None else size for size in value(node).shape]
    return [size for size in sizes if size != 1]


def positions_around(size: int, last: int) -> set[int]:
    """Positions that tell a window or chunk of this size from its neighbours."""
    centres = (size, 2 * size, last // size * size, last - size)
    return {position for centre in centres for position in range(centre - 3, centre + 3)}


def first_hidden(allowed: torch.Tensor, positions: torch.Tensor) -> set[int]:
    """Positions to look at to find the first query that does not see the first key; each round is 200 times finer."""
    hidden = (~allowed[:, 0]).nonzero()
    if not len(hidden) or int(hidden[0, 0]) == 0:
        return set()
    row = int(hidden[0, 0])
    low, high = int(positions[row - 1]), int(positions[row])
    if high - low > 1:
        return set(range(low + 1, high, max(1, (high - low) // 200)))
    last = int(positions[-1])
    return {position for position in positions_around(high, last) if 0 <= position <= last}
