"""Where the tokens are in a value: the domain of the data-flow analysis that proves a graph token parallel.

A value is *uniform* (the same whatever the tokens are: a weight, a constant), or its tokens lie along one axis.
That axis may carry more than the tokens: ``[S * 2, D]`` holds two rows per token. An axis has size
``outer * S * inner``, in that order, S being the dynamic number of tokens.

Routing (mixture of experts) sorts rows by expert and sorts them back. ``order`` remembers by which sort the rows of
a value were permuted; values combine only if their rows are in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from chunkc.passes.fx_tools import symbol_of


@dataclass(frozen=True)
class Uniform:
    """Does not depend on any token, and has no token axis."""


@dataclass(frozen=True)
class Size:
    """A number that depends on how many tokens there are. Good for shapes only."""


@dataclass(frozen=True)
class Tokens:
    """Row t along ``axis`` depends on token t alone (and on uniform values).

    Attributes:
        axis: dimension, counted from the front.
        symbol: the dynamic size S of the batch this axis runs over (all tokens, or the rows with logits).
        outer, inner: the axis has size outer * S * inner.
        order: the sort node by which the rows were permuted, or None for the order of the batch.
        index: the value along the axis is the row number itself (``arange``).
        source: for integers used in routing, the node whose numbers these are, whatever their dtype and order.
    """

    axis: int
    symbol: Any
    outer: int = 1
    inner: int = 1
    order: fx.Node | None = None
    index: bool = False
    source: fx.Node | None = None

    def moved(self, axis: int) -> Tokens:
        """The same along another dimension; what was known of single numbers is forgotten."""
        return Tokens(axis, self.symbol, self.outer, self.inner, self.order)

    def plain(self) -> Tokens:
        """The same, without what is known of its numbers (after arithmetic)."""
        return replace(self, index=False, source=None)


@dataclass(frozen=True)
class Permutation:
    """The row numbers that put rows into the order of ``sort``; one entry per row, ``inner`` rows a token.

    With ``token_of_row``, divided by ``inner``: the token that each sorted row belongs to.
    With ``inverse``, the row numbers that undo the sort.
    """

    sort: fx.Node
    symbol: Any
    inner: int
    token_of_row: bool = False
    inverse: bool = False


@dataclass(frozen=True)
class GroupSizes:
    """How often each value occurs in ``source`` (one entry per expert), or with ``ends`` the running sum of that.

    Depends on all tokens; the only use allowed is to tell a grouped matmul where the groups of sorted rows end.
    """

    source: fx.Node
    ends: bool = False


@dataclass(frozen=True)
class Several:
    """The outputs of an op that returns more than one value."""

    items: tuple[Any, ...]


State = Uniform | Size | Tokens | Permutation | GroupSizes | Several

UNIFORM = Uniform()


class MixesTokens(Exception):
    """Raised by a rule: why this op is not token parallel, in words."""


def coefficient(size: int | torch.SymInt, symbol: Any) -> int | None:
    """c where ``size`` is c * symbol, or None where the size does not depend on the symbol.

    Raises:
        MixesTokens: it depends on it in another way.
    """
    expression = symbol_of(size)
    if expression is None or symbol not in expression.free_symbols:
        return None
    quotient = sympy.simplify(expression / symbol)
    if not quotient.is_Integer:
        raise MixesTokens(f"a dimension of size {expression} is not a multiple of the number of tokens")
    return int(quotient)


def reshaped(state: Tokens, before: Sequence[Any], after: Sequence[Any]) -> Tokens:
    """Where the tokens are after a reshape from shape ``before`` to shape ``after``.

    Raises:
        MixesTokens: the reshape regroups elements across tokens.
    """
    elements_before = state.outer
    for size in before[: state.axis]:
        elements_before *= int(size)
    axes = [axis for axis, size in enumerate(after) if coefficient(size, state.symbol) is not None]
    if len(axes) != 1:
        raise MixesTokens(f"a reshape to {tuple(after)} spreads the tokens over {len(axes)} dimensions")
    (axis,) = axes
    total = coefficient(after[axis], state.symbol)
    for size in after[:axis]:
        if elements_before % int(size):
            raise MixesTokens(f"a reshape from {tuple(before)} to {tuple(after)} regroups across tokens")
        elements_before //= int(size)
    if total % elements_before:
        raise MixesTokens(f"a reshape from {tuple(before)} to {tuple(after)} regroups across tokens")
    outer, inner = elements_before, total // elements_before
    keeps_rows = outer * inner == state.outer * state.inner
    kept = state if keeps_rows else state.plain()
    return Tokens(axis, state.symbol, outer, inner, state.order, kept.index, kept.source)


def broadcast(states: Sequence[State], ranks: Sequence[int], out_rank: int) -> State:
    """The state of an elementwise combination of values of the given ranks.

    Raises:
        MixesTokens: token axes do not line up, rows are in different orders, or an operand may not be computed with.
    """
    result: Tokens | None = None
    for state, rank in zip(states, ranks, strict=True):
        if isinstance(state, Uniform):
            continue
        if isinstance(state, Size):
            raise MixesTokens("a value is computed from the number of tokens in the batch")
        if not isinstance(state, Tokens):
            raise MixesTokens("numbers that depend on all tokens (a sort, counts per expert) are computed with")
        lined_up = replace(state.plain(), axis=state.axis + out_rank - rank)
        if result is None:
            result = lined_up
        elif result != lined_up:
            raise MixesTokens("it combines values whose tokens lie along different dimensions or in different order")
    return result if result is not None else UNIFORM


def check_axes(state: State, result: Any, symbols: Sequence[Any]) -> None:
    """What every rule's answer must satisfy: the result's size depends on the batch along the token axis alone.

    A value ``[S, S]`` is refused here whatever made it: sums over its other axis would depend on the batch's size.

    Args:
        state: what a rule said of ``result``.
        result: the fake value; other than tensors (and tuples of them) pass.
        symbols: the dynamic sizes of batches.

    Raises:
        MixesTokens: it does not hold.
    """
    if isinstance(result, (tuple, list)):
        states = state.items if isinstance(state, Several) else [state] * len(result)
        for item_state, item in zip(states, result, strict=True):
            check_axes(item_state, item, symbols)
    if not isinstance(result, torch.Tensor):
        return
    sizes = list(result.shape)
    if isinstance(state, Tokens):
        rows, axis = state.outer * state.inner, state.axis
    else:
        rows, axis = getattr(state, "inner", 0), 0
    if rows:
        if not 0 <= axis < len(sizes) or symbol_of(sizes[axis]) != rows * state.symbol:
            raise MixesTokens(f"its result of shape {tuple(sizes)} does not hold the tokens where they should be")
        del sizes[axis]
    if any(symbol_of(size) is not None and symbol_of(size).free_symbols & set(symbols) for size in sizes):
        raise MixesTokens(f"its result of shape {tuple(result.shape)} has a row for every token in more than one place")
