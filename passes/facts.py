"""Facts about a graph that passes claim and that the pipeline checks instead of believing.

A checker is a function that raises where its fact does not hold. It lives beside the pass that makes the fact true:

    @register_fact("canonical")
    def check_canonical(graph_module, context): ...
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from chunkc.errors import PassError
from chunkc.passes.base import PassContext

FactChecker = Callable[[fx.GraphModule, PassContext], None]

_CHECKERS: dict[str, FactChecker] = {}


def register_fact(name: str) -> Callable[[FactChecker], FactChecker]:
    """Decorator: ``function(graph_module, context)`` raises where fact ``name`` does not hold."""

    def register(checker: FactChecker) -> FactChecker:
        _CHECKERS[name] = checker
        return checker

    return register


def has_checker(name: str) -> bool:
    """Whether a checker for this fact is registered."""
    return name in _CHECKERS


def check_fact(name: str, graph_module: fx.GraphModule, context: PassContext) -> None:
    """Run the checker of one fact.

    Raises:
        PassError, UnsupportedModelError: the fact does not hold, or it has no checker.
    """
    if name not in _CHECKERS:
        raise PassError(f"fact {name!r} has no checker; add one with passes.facts.register_fact({name!r})")
    _CHECKERS[name](graph_module, context)


def require(condition: bool, message: str) -> None:
    """Raise PassError with ``message`` unless ``condition`` holds (for checkers)."""
    if not condition:
        raise PassError(message)
