"""What a graph assumes of its dynamic sizes.

Tracing follows one path through a model's code, for one number of tokens. Where the code asks something of that
number (``if S % 2:``), the answer becomes a *guard*: the graph is right only where the guard holds. A batch has any
number of tokens, so a guard that some number fails makes the graph wrong there, silently.

A bound from above is another matter (a table of a model's longest sequence, of which a slice is taken). No request is
longer than the bound, so the graph is right for each request by itself; that it treats each token by itself and
computes nothing from the number of tokens is proven apart (``prove_token_parallel``), so it is right for a batch of any
size.
"""

from __future__ import annotations

import sys
from typing import Any

import sympy
from torch.utils._sympy.functions import Max, Min


def holds_for_every_size(guard: Any) -> bool:
    """Whether a guard is known to hold for every size but 0 and 1.

    Guards that exclude only these come from computing strides: a dimension of size 1 may have any stride, and the
    general case is taken, which is right for 1 too (the check at compile runs steps of one token). Two sizes may be
    said to be equal: there are as many positions as token ids. Otherwise only comparisons that are linear in one
    size are decided, exactly; what is not decided does not hold.

    Args:
        guard: a sympy expression over sizes.
    """
    if not guard.free_symbols:
        return bool(guard)
    if isinstance(guard, sympy.Eq) and guard.lhs.is_Symbol and guard.rhs.is_Symbol:
        return True
    if len(guard.free_symbols) != 1 or not isinstance(guard, sympy.core.relational.Relational):
        return False
    (symbol,) = guard.free_symbols
    difference = sympy.expand(guard.lhs - guard.rhs)  # a * size + b, compared with 0
    slope = difference.coeff(symbol, 1)
    offset = difference.subs(symbol, 0)
    if sympy.expand(difference - slope * symbol - offset) != 0 or not (slope.is_Rational and offset.is_Rational):
        return False
    if isinstance(guard, sympy.Ne):
        root = -offset / slope
        return not (root.is_Integer and root >= 2)
    if isinstance(guard, sympy.Eq):
        return False
    # an inequality that holds at 2 and does not turn: rising for > and >=, falling for < and <=
    rises = isinstance(guard, (sympy.Gt, sympy.Ge))
    return bool(guard.subs(symbol, 2)) and (slope > 0 if rises else slope < 0)


def holds_up_to(guard: Any, longest: int) -> bool:
    """Whether a guard is known to hold for every size from 2 to ``longest``.

    As ``holds_for_every_size``; an inequality may turn behind ``longest``, and a minimum or maximum of linear terms is
    the term that it is at both ends.
    """
    if holds_for_every_size(guard):
        return True
    if len(guard.free_symbols) != 1 or longest < 2:
        return False
    (symbol,) = guard.free_symbols

    def decide(extreme: Any) -> Any:
        terms = extreme.args
        if not all(term.is_polynomial(symbol) and sympy.degree(term, symbol) <= 1 for term in terms):
            return extreme
        ends = [[term.subs(symbol, end) for term in terms] for end in (2, longest)]
        best = max if isinstance(extreme, (Max, sympy.Max)) else min
        always = [term for i, term in enumerate(terms) if all(end[i] == best(end) for end in ends)]
        return always[0] if always else extreme

    guard = guard.replace(lambda e: isinstance(e, (Max, Min, sympy.Max, sympy.Min)), decide)
    if not isinstance(guard, sympy.core.relational.Relational):
        return guard == sympy.true
    difference = sympy.expand(guard.lhs - guard.rhs)
    if isinstance(guard, sympy.Eq):
        return difference == 0
    if (
        isinstance(guard, sympy.Ne)
        or not difference.is_polynomial(symbol)
        or sympy.Poly(difference, symbol).degree() > 1
    ):
        return False
    return bool(guard.subs(symbol, 2)) and bool(guard.subs(symbol, longest))


def failing_guards(environment: Any, longest: int | None = None) -> list[str]:
    """The guards of a ``ShapeEnv`` that do not hold for every number of tokens (up to ``longest``), as text."""
    expressions = [guard.expr for guard in environment.guards]
    if longest is None:
        return [str(guard) for guard in expressions if not holds_for_every_size(guard)]
    return [str(guard) for guard in expressions if not holds_up_to(guard, longest)]


def bound_of(environment: Any, size: Any) -> int | None:
    """The largest value that a size, as a symbol of a ``ShapeEnv``, may have under what was traced, or None."""
    upper = environment.var_to_range[size].upper
    return int(upper) if upper < sys.maxsize // 2 else None
