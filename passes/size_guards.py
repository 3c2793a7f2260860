"""What a graph assumes of its dynamic sizes.

Tracing follows one path through a model's code, for one number of tokens. Where the code asks something of that
number (``if S % 2:``), the answer becomes a *guard*: the graph is right only where the guard holds. A batch has any
number of tokens, so a guard that some number fails makes the graph wrong there, silently.
"""

from __future__ import annotations

from typing import Any

import sympy


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


def failing_guards(environment: Any) -> list[str]:
    """The guards of a ``ShapeEnv`` that do not hold for every number of tokens, as text."""
    return [str(guard.expr) for guard in environment.guards if not holds_for_every_size(guard.expr)]
