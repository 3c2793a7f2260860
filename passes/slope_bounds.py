"""Which slopes the entries of a bias allow, each rounded once or twice to its dtype: see ``position_bias``."""

from __future__ import annotations

import torch

#: entries that are looked at in one go, for the memory that takes
_AT_A_TIME = 2**22
_ROUNDINGS = (1, 2)


class SlopeBounds:
    """The slopes, per head, that all entries seen so far allow.

    Args:
        eps: of the model's dtype; entries of a coarser dtype are not excused by more.

    Attributes:
        is_zero_at_own: whether all entries of queries with their own keys were 0.
    """

    def __init__(self, eps: float) -> None:
        self.eps = eps
        self.is_zero_at_own = True
        self._low = torch.empty(0)  # by number of roundings and head, float64 [2, H]
        self._high = torch.empty(0)
        self._shown: torch.Tensor | None = None  # what the nearest entries show, [H]

    def add(self, values: torch.Tensor, positions: torch.Tensor) -> None:
        """Take entries into account.

        Args:
            values: [H, n, n], of query i and key j, of which those with j <= i count; or [H, 1, n], where all queries
                share them.
            positions: int64 [n], ascending.
        """
        by_row = values.shape[1] > 1
        distance = (positions[None, :] - positions[:, None]) if by_row else (positions - positions[0])[None]
        counts = distance < 0 if by_row else distance > 0  # keys before the query's own; all keys but the first
        own = values.diagonal(dim1=1, dim2=2) if by_row else values
        self.is_zero_at_own &= not bool(own.any())
        if not len(self._low):
            self._low = torch.full((len(_ROUNDINGS), len(values)), -torch.inf, dtype=torch.float64)
            self._high = -self._low
        if not bool(counts.any()):
            return
        shown = []
        heads = max(1, _AT_A_TIME // counts.numel())
        for first, some in enumerate(values.split(heads)):
            shown.append(self._add_heads(some, slice(first * heads, (first + 1) * heads), distance, counts, by_row))
        if self._shown is None:
            self._shown = torch.cat(shown)

    def _add_heads(
        self, values: torch.Tensor, heads: slice, distance: torch.Tensor, counts: torch.Tensor, by_row: bool
    ) -> torch.Tensor:
        """The bounds of some heads; returns the slopes [h] that the entries nearest to each other show."""
        eps = min(self.eps, torch.finfo(values.dtype).eps if values.is_floating_point() else 0.0)
        values = values.double()
        against = values.diagonal(dim1=1, dim2=2)[..., None] if by_row else values[..., :1]
        away = distance[counts].double()
        slope = (values - against)[:, counts] / away
        room = (values.abs() + against.abs())[:, counts] / away.abs()
        for index, roundings in enumerate(_ROUNDINGS):
            error = eps / 2 * roundings * (1 + eps)  # of the rounded number, which may be smaller than the exact one
            low, high = (slope - room * error).amax(1), (slope + room * error).amin(1)
            self._low[index, heads] = torch.maximum(self._low[index, heads], low)
            self._high[index, heads] = torch.minimum(self._high[index, heads], high)
        return slope[:, away.abs().argmin()]

    @property
    def are_possible(self) -> bool:
        """Whether every head has a slope, entries being rounded as often as they may be."""
        return self._is_possible(len(_ROUNDINGS) - 1)

    def slopes(self) -> torch.Tensor:
        """One slope per head, float32 [H]; there must be one."""
        if self._shown is None:  # one token: any slope will do
            return torch.zeros(self._low.shape[1])
        index = 0 if self._is_possible(0) else 1
        low, high = self._low[index], self._high[index]
        # what an entry shows is the number that was multiplied with, if it was rounded only with the product
        is_exact = (self._shown >= low) & (self._shown <= high) & (index == 0)
        return torch.where(is_exact, self._shown, (low + high) / 2).float()

    def contradiction(self) -> tuple[int, float, float]:
        """The head that fits least: (head, its slope is at most this, and at least that)."""
        low, high = self._low[-1], self._high[-1]
        head = int((low - high).argmax())
        return head, float(high[head]), float(low[head])

    def _is_possible(self, index: int) -> bool:
        low, high = self._low[index], self._high[index]
        slack = 1e-12 * torch.maximum(low.abs(), high.abs()).nan_to_num(posinf=0.0)  # of float64 sums
        return bool((low <= high + slack).all())
