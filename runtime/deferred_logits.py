"""The logits of a step, of which the head's product is still to come.

What is made of them is known only when somebody asks: all requests that are greedy want the largest of each row, and
get it without a row being written down; those that sample want rows; a prefill chunk that does not end its prompt
wants nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class DeferredLogits:
    """L rows of logits over V tokens.

    Attributes:
        num_rows: L.
        rows: computes them, float32 [L, V].
        best: computes the token of each row's largest logit (the lowest of equals), int64 [L], and that logit, float32
            [L], NaN where the row holds one.
    """

    num_rows: int
    rows: Callable[[], torch.Tensor] = field(repr=False)
    best: Callable[[], tuple[torch.Tensor, torch.Tensor]] = field(repr=False)


#: what a model gives for a step: tensors [L, V] of any float dtype, or those to come
Logits = torch.Tensor | DeferredLogits


def rows_of(logits: Logits) -> torch.Tensor:
    """The rows, [L, V], computed if need be."""
    return logits.rows() if isinstance(logits, DeferredLogits) else logits
