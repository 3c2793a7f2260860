"""Finds the first pass after which the numbers differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from tabulate import tabulate
from torch import fx

from chunkc.passes.execute import run_on_prompt


@dataclass(frozen=True)
class StageError:
    """How far one stage's logits are from the reference.

    Attributes:
        name: the stage ("captured", or the pass after which the graph was taken).
        error: largest absolute difference of a logit.
    """

    name: str
    error: float


@dataclass(frozen=True)
class BisectResult:
    """What ``bisect`` found; ``str()`` is a table.

    Attributes:
        stages: every stage, in order.
        culprit: the first stage whose error is above ``tolerance``, or None.
        tolerance: largest absolute difference that counts as rounding.
    """

    stages: tuple[StageError, ...]
    culprit: str | None
    tolerance: float

    def __str__(self) -> str:
        rows = [(s.name, f"{s.error:.3g}", "<- first" if s.name == self.culprit else "") for s in self.stages]
        return tabulate(rows, ["after", f"max error ({self.tolerance:.0e} allowed)", ""])


def bisect(
    stages: Mapping[str, fx.GraphModule],
    input_ids: torch.Tensor,
    reference: torch.Tensor,
    *,
    tolerance: float = 1e-3,
) -> BisectResult:
    """Run every stage on one prompt and compare.

    Args:
        stages: graphs by name, in order, as ``pipeline.Snapshots`` collects them.
        input_ids: int64 [S].
        reference: logits [S, V] of the untouched model for that prompt.
        tolerance: see ``BisectResult``.
    """
    errors = []
    for name, graph_module in stages.items():
        logits = run_on_prompt(graph_module, input_ids)
        errors.append(StageError(name, float((logits.double() - reference.double()).abs().max())))
    culprit = next((stage.name for stage in errors if not stage.error <= tolerance), None)
    return BisectResult(tuple(errors), culprit, tolerance)
