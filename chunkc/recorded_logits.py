"""Logits in little room: enough to tell, at a later start, whether a graph still computes what was checked.

Of a row of V logits a sketch of 1024 numbers is kept: the logits times fixed random signs, summed up in turns. The
sketch of a difference is the difference of the sketches, and its length is the difference's within a few percent,
whichever logits differ (exactly, where V is no larger).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from chunkc.check import ModelLogits

_SIZE = 1024
#: rows that are worked on at a time
_ROWS = 16


@dataclass(frozen=True)
class RecordedLogits:
    """See ``chunkc.check.Expected``.

    Attributes:
        sketches: float32 [S, 1024] for each prompt.
        spreads: standard deviation of each row, float32 [S] for each prompt.
    """

    prompts: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    sketches: tuple[torch.Tensor, ...]
    spreads: tuple[torch.Tensor, ...]
    source: str = "the model's logits, kept by an earlier start,"

    def row_errors(self, prompt: int, start: int, end: int, logits: torch.Tensor) -> torch.Tensor:
        """See ``Expected``."""
        difference = (_sketch(logits) - self.sketches[prompt][start:end]).double()
        squares = difference.pow(2).sum(dim=-1) / logits.shape[-1]
        return squares.sqrt() / self.spreads[prompt][start:end].double().clamp_min(1e-6)


def record(expected: ModelLogits) -> dict[str, torch.Tensor]:
    """What is to be kept of logits, by name: tensors for ``recorded``."""
    spreads = [torch.cat([rows.double().std(dim=-1) for rows in each.split(_ROWS)]) for each in expected.logits]
    return {
        "sketches": torch.cat([_sketch(logits) for logits in expected.logits]),
        "spreads": torch.cat(spreads).float(),
        "like": torch.empty(0, dtype=expected.dtype),
    }


def recorded(kept: dict[str, torch.Tensor], prompts: tuple[torch.Tensor, ...]) -> RecordedLogits:
    """The logits of these prompts as ``record`` kept them.

    Raises:
        ValueError: they are of other prompts.
    """
    lengths = [len(prompt) for prompt in prompts]
    sketches, spreads, like = (kept.get(name) for name in ("sketches", "spreads", "like"))
    if sketches is None or spreads is None or like is None or len(spreads) != sum(lengths):
        raise ValueError("the logits kept are of another probe")
    return RecordedLogits(prompts, like.dtype, sketches.split(lengths), spreads.split(lengths))


def _sketch(logits: torch.Tensor) -> torch.Tensor:
    """[S, V] -> float32 [S, 1024]."""
    signs = _signs(logits.shape[-1])
    padding = (0, -logits.shape[-1] % _SIZE)
    parts = []
    for rows in logits.split(_ROWS):
        signed = torch.nn.functional.pad(rows.float() * signs, padding)
        parts.append(signed.view(len(rows), -1, _SIZE).sum(dim=1))
    return torch.cat(parts)


@functools.lru_cache(maxsize=2)
def _signs(count: int) -> torch.Tensor:
    return torch.randint(2, (count,), generator=torch.Generator().manual_seed(2)).float() * 2 - 1
