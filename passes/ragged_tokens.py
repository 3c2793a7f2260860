"""ragged_tokens: the program of one sequence [1, S] becomes the program of a batch's tokens [T].

Inputs become flat; the leading dimension of 1 stays inside the graph, where it costs nothing. Positions come from
the batch: wherever the model numbers its tokens with an ``arange`` and uses the numbers as positions, it gets the
positions of the requests' tokens instead. An ``arange`` that numbers *rows* (to pick each row's own entry) stays.

before::

    %input_ids    : i64[1, S]
    %position_ids : i64[1, S]
    %n     = aten.arange(S)
    %pos   = aten.embedding(%table, %n)
    return %logits                                     # [1, S, V]

after::

    %input_ids    : i64[T]
    %positions    : i64[T]
    %ids   = aten.unsqueeze(%input_ids, 0)
    %pos   = aten.embedding(%table, %positions)
    return aten.squeeze(%logits, 0)                    # [T, V]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import (
    aten,
    call,
    fake_mode_of,
    is_call,
    new_size,
    output_node,
    placeholders,
    refuse,
    symbol_of,
    value,
)
from chunkc.passes.size_guards import bound_of

_CARRIES = (aten.unsqueeze, aten.expand, aten.reshape, aten._to_copy, aten.clone)


@dataclass(frozen=True)
class RaggedTokens(GraphPass):
    """See the module's text. Ensures ``ragged``."""

    name = "ragged_tokens"
    requires = ("token_parallel",)
    ensures = ("ragged",)
    expects_matches = True

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Raises UnsupportedModelError where the output does not have the leading dimension of one sequence."""
        graph = graph_module.graph
        inputs = placeholders(graph)
        # a model that ignores its positions is captured with two sizes that nothing ties together
        traced = value(inputs["input_ids"]).shape[1]
        size = _unbounded(graph, traced)
        _flatten(graph, inputs["input_ids"], "input_ids", size)
        flat_positions = _flatten(graph, inputs["position_ids"], "positions", size)
        replaced = _positions_for_ranges(graph, flat_positions, symbol_of(traced))
        logits = output_node(graph)
        if value(logits).dim() != 3 or value(logits).shape[0] != 1:
            raise refuse(logits, f"the model's output has shape {tuple(value(logits).shape)}, not [1, S, V]")
        with graph.inserting_before(graph.output_node()):
            rows = call(graph, aten.squeeze.dim, logits, 0, like=logits)
        graph.output_node().args = (rows,)
        graph.eliminate_dead_code()
        notes = (f"{replaced} uses of a token's number as its position",) if replaced else ()
        return PassReport(2 + replaced, notes=notes)


def _unbounded(graph: fx.Graph, traced: torch.SymInt) -> torch.SymInt:
    """The size of a batch: that of the sequence that was traced, or a new one where a sequence is bounded.

    What was assumed of the length of a sequence is then assumed of nothing in the graph any more.
    """
    environment = fake_mode_of(graph).shape_env
    if bound_of(environment, symbol_of(traced)) is None:
        return traced
    environment.guards[:] = [g for g in environment.guards if symbol_of(traced) not in g.expr.free_symbols]
    return new_size(graph, "tokens", 13)


def _flatten(graph: fx.Graph, old: fx.Node, name: str, size: torch.SymInt) -> fx.Node:
    """Replace an input [1, S] by one [size]; its uses see it unsqueezed. Returns the new input."""
    with graph.inserting_before(old):
        new = graph.placeholder(name)
    with fake_mode_of(graph):
        new.meta["val"] = torch.empty((size,), dtype=value(old).dtype, device="cpu")
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        row = call(graph, aten.unsqueeze.default, new, 0, like=old)
    row.meta["val"] = value(new).unsqueeze(0)
    old.replace_all_uses_with(row)
    graph.erase_node(old)
    new.name = name
    return new


def _positions_for_ranges(graph: fx.Graph, positions: fx.Node, symbol: Any) -> int:
    """Where ``arange(T)`` serves as positions, put the batch's positions. Returns the number of uses changed."""
    changed = 0
    for node in list(graph.nodes):
        if not _is_token_range(node, symbol):
            continue
        if symbol_of(value(node).shape[0]) == symbol:
            changed += _use_positions(graph, node, _cast_to(graph, positions, node))
        elif not all(_numbers_rows(node, user) for user in node.users):
            raise refuse(node, "positions are computed from a range that is longer than the sequence")
    return changed


def _is_token_range(node: fx.Node, symbol: Any) -> bool:
    if not is_call(node, aten.arange):
        return False
    size = symbol_of(value(node).shape[0])
    return size is not None and symbol in size.free_symbols


def _use_positions(graph: fx.Graph, numbers: fx.Node, positions: fx.Node) -> int:
    """Put ``positions`` in the place of row numbers wherever they serve as such. Returns the number of uses."""
    changed = 0
    for user in list(numbers.users):
        if _numbers_rows(numbers, user):
            continue
        if is_call(user, *_CARRIES):  # what it carries may serve as both
            with graph.inserting_after(user):
                carried = graph.node_copy(user, lambda n: positions if n is numbers else n)
            changed += _use_positions(graph, user, carried)
        else:
            user.replace_input_with(numbers, positions)
            changed += 1
    return changed


def _cast_to(graph: fx.Graph, positions: fx.Node, node: fx.Node) -> fx.Node:
    if value(node).dtype == torch.int64:
        return positions
    with graph.inserting_after(node):
        return call(graph, aten._to_copy.default, positions, like=node, dtype=value(node).dtype)


def _numbers_rows(node: fx.Node, user: fx.Node) -> bool:
    """Whether ``user`` uses token numbers to pick each row's own entry, and not as positions."""
    if is_call(user, aten.index):
        return node in user.args[1] and value(user.args[0]).dim() > 0 and _has_tokens(user.args[0])
    if is_call(user, aten.index_put):
        return True
    if is_call(user, *_CARRIES):
        return bool(user.users) and all(_numbers_rows(user, further) for further in user.users)
    return False


def _has_tokens(node: fx.Node) -> bool:
    return any(symbol_of(size) is not None for size in value(node).shape)


@register_fact("ragged")
def check_ragged(graph_module: fx.GraphModule, context: PassContext) -> None:
    """Inputs are flat, and no ``arange`` over the tokens serves as positions."""
    inputs = placeholders(graph_module.graph)
    for name in ("input_ids", "positions"):
        require(name in inputs and value(inputs[name]).dim() == 1, f"the graph has no flat input {name}")
    symbol = symbol_of(value(inputs["input_ids"]).shape[0])
    for node in graph_module.graph.nodes:
        if _is_token_range(node, symbol):
            for user in node.users:
                require(_numbers_rows(node, user), f"{user.name} takes a token's number in the batch as its position")
