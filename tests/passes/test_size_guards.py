"""Which guards a graph may have been traced under."""

from __future__ import annotations

import pytest
from sympy import Eq, Ge, Gt, Le, Lt, Mod, Ne, Symbol, false, true

from chunkc.passes.size_guards import holds_for_every_size

S, T = Symbol("s", integer=True, nonnegative=True), Symbol("t", integer=True, nonnegative=True)


@pytest.mark.parametrize("guard", [Ne(S, 1), Gt(S, 1), Ge(S, 2), Ge(S, 0), Eq(S, T), Ne(S, 0), Gt(3 * S, 2)], ids=str)
def test_holds(guard):
    assert holds_for_every_size(guard)


@pytest.mark.parametrize(
    "guard",
    [
        *(Eq(Mod(S, 2), 1), Ne(S, 77), Ne(S, 7919), Lt(S, 50000), Le(S, 2048), Ge(S, 3), Eq(S, 13), Gt(S, 12)),
        *(Ne(2 * S, 15838), Le(S, T), Ne(S, T), Eq(S, 2 * T), Ne(Mod(S, 101), 7), false),
        *(Gt(S * S, 3), Ne(S // 2, 77), Lt(2 * S, 10**9), Eq(S, 5), Ge(10**9, S)),
    ],
    ids=str,
)
def test_does_not_hold(guard):
    assert not holds_for_every_size(guard)


def test_a_constant():
    assert holds_for_every_size(true)
