"""Token rules for mixture of experts: rows are sorted by expert, multiplied group by group, and sorted back.

Each step alone looks as if it mixed tokens. Together they do not, and that is what these rules follow:

    sorted, order = sort(expert_of_row)            rows in the order of the sort
    x[order // k]                                  token rows, permuted by that sort
    cumsum(histc(sorted))                          where each expert's rows end *in that same order*
    grouped_mm(x_sorted, weights, ends)            row r meets the weights of its own expert: token parallel
    y[inverse of order]                            back in the batch's order

A group end that belongs to another sort than the rows do is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from chunkc.passes.fx_tools import aten, is_call, rank, value
from chunkc.passes.token_axis import (
    UNIFORM,
    GroupSizes,
    MixesTokens,
    Permutation,
    Several,
    State,
    Tokens,
    Uniform,
    broadcast,
    coefficient,
)
from chunkc.passes.token_rules import EXACT, Analysis, elementwise, keep_out, only_tokens, rowwise, token_rule


@token_rule(aten.arange)
def _arange(node: fx.Node, at: Analysis) -> State:
    for symbol in at.symbols:
        times = coefficient(value(node).shape[0], symbol)
        if times is not None:
            start = 0 if node.target is aten.arange.default else node.args[0]
            step = node.args[2] if node.target is aten.arange.start_step and len(node.args) > 2 else 1
            if start != 0 or step != 1:
                raise MixesTokens("it numbers the tokens from something other than 0")
            return Tokens(0, symbol, 1, times, index=True)
    return UNIFORM


@token_rule(aten.sort, aten.argsort)
def _sort(node: fx.Node, at: Analysis) -> State:
    state = at.state(node.args[0])
    several = isinstance(value(node), (tuple, list))
    if isinstance(state, Permutation) and not several and not state.token_of_row:
        return replace(state, inverse=not state.inverse)  # sorting a permutation gives its inverse
    state = only_tokens(state)
    if state is None:
        return Several((UNIFORM, UNIFORM)) if several else UNIFORM
    dim = node.args[1] if len(node.args) > 1 and not isinstance(node.args[1], bool) else node.kwargs.get("dim", -1)
    if dim % rank(node.args[0]) != state.axis:
        result = rowwise(node, at, dim, True, "sorts")
        return Several((result, result)) if several else result
    descending = node.kwargs.get("descending", node.args[2] if len(node.args) > 2 else False)
    if rank(node.args[0]) != 1 or state.order is not None or state.outer != 1 or descending:
        raise MixesTokens("it sorts tokens")
    order = Permutation(node, state.symbol, state.inner)
    source = state.source or node.args[0]
    in_order = Tokens(0, state.symbol, 1, state.inner, order=node, source=source)
    return Several((in_order, order)) if several else order


@token_rule(aten.floor_divide, aten.div)
def _divide(node: fx.Node, at: Analysis) -> State:
    state = at.state(node.args[0])
    if isinstance(state, Permutation):
        whole = node.target is aten.floor_divide.default or node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if not whole or node.args[1] != state.inner or state.inverse or state.token_of_row:
            raise MixesTokens("it computes with the order of sorted tokens")
        return replace(state, token_of_row=True)
    return elementwise(node, at)


@token_rule(aten.histc, aten.bincount)
def _counts(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    if rank(node.args[0]) != 1 or not _counts_every_number(node):
        raise MixesTokens("it counts over tokens")
    return GroupSizes(state.source or _uncast(node.args[0]))


def _counts_every_number(node: fx.Node) -> bool:
    """Whether a histogram has one bin for each of the numbers 0, 1, ..."""
    if node.target is aten.bincount.default:
        return len(node.args) < 2 or node.args[1] is None
    bins, low, high = (*node.args[1:], 100, 0, 0)[:3]
    return low == 0 and high == bins - 1


@token_rule(aten.cumsum)
def _cumsum(node: fx.Node, at: Analysis) -> State:
    state = at.state(node.args[0])
    if isinstance(state, GroupSizes) and not state.ends and rank(node) == 1:
        return replace(state, ends=True)
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    return rowwise(node, at, dim, True, "sums up")


def _grouped_mm(node: fx.Node, at: Analysis) -> State:
    rows, weights = node.args[0], node.args[1]
    ends = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    state, groups = only_tokens(at.state(rows)), at.state(ends)
    if not isinstance(at.state(weights), Uniform) or state is None or not isinstance(groups, GroupSizes):
        raise MixesTokens("a grouped product whose groups are not counts of sorted rows")
    sorted_by = state.order
    if sorted_by is None or not groups.ends or not _same_numbers(at, groups.source, sorted_by.args[0]):
        raise MixesTokens("a grouped product whose rows are not sorted by what its groups count")
    keep_out(state, -1, rank(rows), "multiplies")
    return state.moved(state.axis)


for _name in ("grouped_mm_fallback", "grouped_mm", "_grouped_mm"):
    for _namespace in ("transformers", "aten"):
        if hasattr(getattr(torch.ops, _namespace), _name):
            token_rule(getattr(getattr(torch.ops, _namespace), _name))(_grouped_mm)


def register_late_operators() -> None:
    """transformers defines its fallback operator when its mixture-of-experts module is first imported."""
    try:
        token_rule(torch.ops.transformers.grouped_mm_fallback)(_grouped_mm)
    except AttributeError:
        pass


@token_rule(aten.index)
def _index(node: fx.Node, at: Analysis) -> State:
    tensor, indices = node.args[0], node.args[1]
    base = at.state(tensor)
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    states = [at.state(index) for _, index in given]
    if any(value(index).dtype == torch.bool for _, index in given):
        raise MixesTokens("it picks rows by a condition, so how many there are depends on the tokens")
    if len(given) == 1 and isinstance(states[0], Permutation):
        return _permute_rows(tensor, base, given[0][0], states[0])
    for state in states:
        only_tokens(state)
    base = only_tokens(base)
    adjacent = [dim for dim, _ in given] == list(range(given[0][0], given[0][0] + len(given)))
    if not adjacent:
        raise MixesTokens("it indexes dimensions that are not next to each other")
    ranks = [rank(index) for _, index in given]
    index_rank = max(ranks)
    joint = broadcast(states, ranks, index_rank)
    first = given[0][0]
    if base is None:
        return UNIFORM if isinstance(joint, Uniform) else joint.moved(first + joint.axis)
    indexed = [(dim, index) for dim, index in given if dim == base.axis]
    if indexed:
        own_row = at.state(indexed[0][1])
        is_own = isinstance(own_row, Tokens) and own_row.index and own_row.symbol == base.symbol
        if not is_own or base.order is not None or not own_row.inner == base.inner == base.outer == 1:
            raise MixesTokens("it picks rows of other tokens")
        return joint.moved(first + joint.axis)
    if isinstance(joint, Tokens):
        raise MixesTokens("it looks up every token's value for every other token")
    removed = len(given) if first < base.axis else 0
    return base.moved(base.axis - removed + (index_rank if first < base.axis else 0))


def _permute_rows(tensor: fx.Node, base: State, dim: int, permutation: Permutation) -> State:
    state = only_tokens(base)
    if state is None or state.axis != dim or state.symbol != permutation.symbol or state.outer != 1:
        raise MixesTokens("it picks rows by a sort of other rows")
    if permutation.inverse:
        if state.order is not permutation.sort or state.inner != permutation.inner:
            raise MixesTokens("it undoes a sort that its rows are not in the order of")
        return Tokens(dim, state.symbol, 1, state.inner)
    rows_each = 1 if permutation.token_of_row else permutation.inner
    if state.order is not None or state.inner != rows_each:
        raise MixesTokens("it sorts rows that are not in the batch's order")
    source = state.source or _uncast(tensor)
    return Tokens(dim, state.symbol, 1, permutation.inner, order=permutation.sort, source=source)


@token_rule(aten.index_put)
def _index_put(node: fx.Node, at: Analysis) -> State:
    """``empty[order] = arange`` is the inverse of ``order``."""
    indices, values = node.args[1], node.args[2]
    order = at.state(indices[0]) if len(indices) == 1 else None
    numbers = at.state(values)
    accumulate = len(node.args) > 3 and node.args[3]
    if (
        isinstance(order, Permutation)
        and not order.token_of_row
        and isinstance(numbers, Tokens)
        and numbers.index
        and numbers.inner == order.inner
        and rank(node) == 1
        and not accumulate
    ):
        return replace(order, inverse=not order.inverse)
    if all(isinstance(at.state(argument), Uniform) for argument in (node.args[0], *indices, values)):
        return UNIFORM
    raise MixesTokens("it writes to places that depend on the tokens")


@token_rule(aten.index_add)
def _index_add(node: fx.Node, at: Analysis) -> State:
    """Adding sorted rows to the tokens they came from."""
    base, dim, index, rows = node.args[:4]
    order, added, target = at.state(index), only_tokens(at.state(rows)), only_tokens(at.state(base))
    if (
        isinstance(order, Permutation)
        and order.token_of_row
        and added is not None
        and added.order is order.sort
        and added.axis == dim
        and target is not None
        and target.axis == dim
        and target.inner == target.outer == 1
        and target.order is None
        and added.inner == order.inner
        and added.outer == 1
    ):
        return Tokens(dim, added.symbol)
    raise MixesTokens("it adds rows to places that depend on the tokens")


@token_rule(aten.index_select)
def _index_select(node: fx.Node, at: Analysis) -> State:
    base, dim, index = node.args
    state, rows = only_tokens(at.state(base)), at.state(index)
    if isinstance(rows, Permutation):
        return _permute_rows(base, at.state(base), dim % rank(base), rows)
    rows = only_tokens(rows)
    if state is None:
        return UNIFORM if rows is None else rows.moved(dim % rank(base) + rows.axis)
    if rows is None:
        keep_out(state, dim, rank(base), "selects rows")
        return state.moved(state.axis)
    if index.op == "placeholder" and index.target == "logits_rows" and state.inner == state.outer == 1:
        if dim % rank(base) == state.axis and state.order is None:
            return Tokens(state.axis, rows.symbol)
    raise MixesTokens("it picks rows of other tokens")


def _uncast(node: Any) -> Any:
    while isinstance(node, fx.Node) and node.op == "call_function":
        if not is_call(node, aten._to_copy, aten.clone, aten.reshape) or value(node).dtype not in EXACT:
            break
        node = node.args[0]
    return node


def _same_numbers(at: Analysis, counted: fx.Node, sorted_by: fx.Node) -> bool:
    """Whether what was counted is what was sorted, in any order or dtype."""
    return _uncast(counted) is _uncast(sorted_by)
