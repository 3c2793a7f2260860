"""What passes say of themselves, for ``explain()``: plain data that is kept with a prepared model. A leaf module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Skipped:
    """Something a pass looked at and left alone.

    Attributes:
        what: the node or module concerned.
        why: the reason, in words.
    """

    what: str
    why: str


@dataclass(frozen=True)
class PassReport:
    """What one run of one pass did.

    Attributes:
        matches: how many places were rewritten (or, for an analysis, examined).
        skipped: candidates that were left alone, with the reason.
        notes: findings for ``explain()``, in words.
    """

    matches: int
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PassRecord:
    """One row of ``explain()``.

    Attributes:
        name: the pass.
        report: what it said of itself.
        nodes_before, nodes_after: number of nodes in the graph.
        seconds: time in the pass, and in checking the graph after it.
    """

    name: str
    report: PassReport
    nodes_before: int
    nodes_after: int
    seconds: float
    check_seconds: float
