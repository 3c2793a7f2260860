"""Which guards a graph may have been traced under."""

from __future__ import annotations

import pytest
from sympy import Eq, Ge, Gt, Le, Lt, Max, Min, Mod, Ne, Symbol, false, true

from chunkc.passes.size_guards import holds_for_every_size, holds_up_to

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


@pytest.mark.parametrize(
    "guard",
    [
        *(Ne(S, 1), Le(S, 255), Lt(S, 256), Gt(256 - S, 0), Lt(S, 50000), Ge(S, 2), Eq(S, T)),
        *(Eq(S, 256 - Max(0, 256 - S)), Eq(S, Min(S, 255)), Gt(Max(0, 300 - S), 0), true),
    ],
    ids=str,
)
def test_holds_up_to_a_bound(guard):
    assert holds_up_to(guard, 255)


@pytest.mark.parametrize(
    "guard",
    [
        *(Lt(S, 255), Gt(S, 12), Ne(S, 77), Ne(S, 255), Eq(S, 13), Eq(Mod(S, 2), 1), Le(S, T), false),
        *(Eq(S, Min(S, 254)), Gt(Max(0, 255 - S), 0), Ne(S * S, 49), Lt(S * (S - 300), 0), Eq(Max(S, 9), S)),
        *(Gt(Max(S * S, 9), 3), Eq(Max(S, T), S), Ge(S // 2 + 256, S)),
    ],
    ids=str,
)
def test_does_not_hold_up_to_a_bound(guard):
    assert not holds_up_to(guard, 255)
