"""Runs the part of a graph that computes an attention mask or a bias, on real numbers, for any number of tokens.

Such a part may know how many tokens there are and at which positions they stand. It must not know which tokens they
are, and may use their number for shapes only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from chunkc.passes.attributes import attribute
from chunkc.passes.fx_tools import aten, is_call, rank, refuse, symbol_of, value
from chunkc.passes.mask_sampling import SHAPE_ONLY, ancestors, dynamic_dims, is_token_range, whole_nodes
from chunkc.passes.size_arguments import sizes_as_numbers

#: what running such code raises where it does not fit the length
EVALUATION_ERRORS = (RuntimeError, IndexError, ValueError)


def table_behind(node: fx.Node) -> fx.Node | None:
    """The constant [.., 1, N] of which ``node`` is as many entries in a row as there are tokens, from anywhere on.

    What is linear along the whole table is linear along any part of it, with the same slope. None where ``node`` is not
    such a part.
    """
    if rank(node) < 2 or symbol_of(value(node).shape[-1]) is None:
        return None
    while is_call(node, aten.slice):
        source, dim, step = node.args[0], node.args[1] if len(node.args) > 1 else 0, (*node.args[4:], 1)[0]
        if step != 1 or (dim % rank(node) != rank(node) - 1 and value(source).shape[dim] != 1):
            return None
        node = source
    is_table = dynamic_dims(node) == 0 and value(node).shape[-2] == 1
    return node if is_table and not any(other.op == "placeholder" for other in ancestors(node)) else None


class Evaluation:
    """What a node computes, as a function of the sequence's length.

    Args:
        node: a tensor.
        what: how errors call it.

    Attributes:
        can_sample: whether its entries at some positions can be had without those between.
        is_quadratic: whether it, broadcast to [S, S], differs between queries, or anything that leads to it has an
            entry for every pair of tokens.

    Raises:
        UnsupportedModelError: it depends on which tokens there are, or computes with their number.
    """

    def __init__(self, graph_module: fx.GraphModule, node: fx.Node, what: str) -> None:
        self.graph_module = graph_module
        self.node = node
        self.program = ancestors(node)
        self._whole = whole_nodes(self.program)
        self.can_sample = self._whole is not None
        by_query = rank(node) > 1 and symbol_of(value(node).shape[-2]) is not None
        self.is_quadratic = by_query or any(dynamic_dims(other) > 1 for other in self.program)
        self._check_inputs(what)

    def __call__(self, length: int, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The node's value for one sequence of ``length`` tokens, or its entries at ``positions``, int64 [n].

        Raises:
            One of EVALUATION_ERRORS: it cannot be computed for this length.
        """
        rows = length if positions is None else len(positions)
        values: dict[fx.Node, Any] = {}
        for node in self.program:
            values[node] = self._run(node, values, length, rows, positions)
        return values[self.node]

    def last_that_runs(self, runs: int, fails: int) -> int:
        """The longest length below ``fails`` that can be computed, if ``runs`` can be."""
        while fails - runs > 1:
            middle = (runs + fails) // 2
            try:
                self(middle)
                runs = middle
            except EVALUATION_ERRORS:
                fails = middle
        return runs

    def _check_inputs(self, what: str) -> None:
        for node in self.program:
            if node.op == "placeholder" and node.target == "input_ids":
                users = [user for user in node.users if user in self.program]
                reading = [user for user in users if not is_call(user, aten.sym_size, *SHAPE_ONLY)]
                if reading:
                    raise refuse(reading[0], f"{what} depends on which tokens the prompt holds")
            if sizes_as_numbers(node):
                raise refuse(node, f"{what} depends on how long the sequence is")

    def _run(
        self,
        node: fx.Node,
        values: dict[fx.Node, Any],
        length: int,
        rows: int,
        positions: torch.Tensor | None,
    ) -> Any:
        if node.op == "placeholder":
            if node.target == "input_ids":  # only asked for their shape
                return torch.zeros(1, rows, dtype=torch.int64)
            sampled = positions is not None and not self._whole
            return (positions if sampled else torch.arange(length))[None]
        if node.op == "get_attr":
            return attribute(self.graph_module, node.target)
        if is_call(node, aten.sym_size):
            return rows if symbol_of(value(node)) is not None else value(node)
        if positions is not None and is_token_range(node):
            return positions
        args = fx.node.map_arg(node.args, lambda n: values[n])
        kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
        return node.target(*args, **kwargs)
