"""What an additive bias on attention scores means, proven by evaluating the code that computes it.

One kind is known, ALiBi: for each head a slope, and between query i and key j the bias ``slope * (j - i)``. What is the
same for all keys of a query may be added to that (``slope * j`` is what most models compute), as softmax takes it away
again. Only keys that the query sees count: j <= i.

**Rounding.** A bias is a number of some dtype, so it is never exactly linear. Each entry stands for the interval of
numbers that round to it, in one rounding or (divided or scaled afterwards) two. An entry at distance d bounds the slope
by its interval over d, and the slope must lie within the bounds of all entries of a head, at all lengths looked at. If
nothing does, the bias is not ALiBi and is refused: whatever bends by more than its dtype's rounding::

    bias of one head in bfloat16     0   0.707   1.414   2.125   2.828     (slope 0.7071)
    bounds of the slope                   [.7051   .7090]
                                          [.7051   .7090]
                                          [.7057   .7109] ..               -> what is left when all have been seen

The slope is then the one that an entry shows exactly if that is within the bounds (in float32: it is the number that
the model multiplies with), else their middle. ``slope_bounds`` does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx, nn

from chunkc.passes.attributes import attribute
from chunkc.passes.fx_tools import refuse, value
from chunkc.passes.mask_evaluation import EVALUATION_ERRORS, Evaluation, table_behind
from chunkc.passes.mask_meaning import DEFAULT_LONGEST, SHORT_LENGTHS
from chunkc.passes.slope_bounds import SlopeBounds

#: entries of a bias that are evaluated at a time, where all must be
_MOST_ENTRIES = 2**22
#: where a bias has an entry for every pair of tokens and may be sampled: so many positions in a row at a time, beside
#: the first one and the last one. So each position is looked at with its neighbours, and each distance from the first.
_BLOCK = 64
_ONLY_ALIBI = "Of position biases, only ALiBi with constant slopes is supported."
#: no model is served for shorter sequences than this because its numbers overflow beyond
_SHORTEST_LIMIT = 256


@dataclass(frozen=True)
class PositionBias:
    """An ALiBi bias.

    Attributes:
        slopes: float32 [H], or [1] where all heads share it; of any sign.
        is_zero_at_own: whether it is ``slope * (j - i)`` and nothing else, so 0 at each query's own key.
        proven_length: longest sequence for which this is proven, in tokens; None for the model's longest.
    """

    slopes: torch.Tensor
    is_zero_at_own: bool
    proven_length: int | None


def prove_alibi(
    graph_module: fx.GraphModule,
    bias: fx.Node,
    *,
    longest: int | None,
    dtype: torch.dtype = torch.float32,
    largest: float = float("inf"),
) -> PositionBias:
    """Find the slopes of a bias.

    Args:
        bias: node computing a tensor that broadcasts to [1, H, S, S].
        longest: longest sequence the model is defined for, in tokens, or None.
        dtype: of the model: what its roundings excuse. Those of a coarser dtype are the bias's own and excuse nothing.
        largest: magnitude that it must stay below, so that masks are stronger; sequences are limited to where it does.

    Raises:
        UnsupportedModelError: it depends on the tokens or on trained parameters, or is not ALiBi.
    """
    return _Prover(graph_module, bias, longest or DEFAULT_LONGEST, dtype, largest).prove()


def _block(begin: int, limit: int) -> torch.Tensor:
    """Positions to look at together, ascending."""
    return torch.tensor(sorted({0, *range(begin, min(begin + _BLOCK, limit)), limit - 1}))


class _Overflow(Exception):
    """The bias is too large, or not finite, at this length."""


class _Prover:
    def __init__(
        self, graph_module: fx.GraphModule, bias: fx.Node, longest: int, dtype: torch.dtype, largest: float
    ) -> None:
        self.bias = bias
        self.eps = torch.finfo(dtype).eps
        self.longest = longest
        self.largest = largest
        self.table = table_behind(bias)
        self.evaluation = Evaluation(graph_module, self.table or bias, "a bias on attention scores")
        for node in self.evaluation.program:
            if node.op == "get_attr" and isinstance(attribute(graph_module, node.target), nn.Parameter):
                raise refuse(
                    node,
                    "a bias on attention scores is computed from trained parameters",
                    _ONLY_ALIBI,
                )

    def prove(self) -> PositionBias:
        limit = self.longest
        while True:
            try:
                return self._prove(limit)
            except _Overflow as reason:
                if limit <= _SHORTEST_LIMIT:
                    raise refuse(self.bias, f"a bias on attention scores is {reason}") from None
                limit = max(limit // 2, _SHORTEST_LIMIT)

    def _prove(self, limit: int) -> PositionBias:
        bounds, reach = SlopeBounds(self.eps), 0
        for values, positions in self._entries(limit):
            bounds.add(values, positions)
            if not bounds.are_possible:
                head, at_most, at_least = bounds.contradiction()
                raise refuse(
                    self.bias,
                    "a bias on attention scores is not ALiBi: it is not linear in the distance between query and key "
                    f"(head {head}: some keys ask for a slope of at most {at_most:.6g}, others of at least "
                    f"{at_least:.6g})",
                    f"{_ONLY_ALIBI} Where it is rounded to a dtype coarser than the model's, serve the model in that.",
                )
            reach = max(reach, int(positions[-1]) + 1)
        is_zero_at_own = bounds.is_zero_at_own and self.table is None
        return PositionBias(bounds.slopes(), is_zero_at_own, reach if reach < self.longest else None)

    def _entries(self, limit: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Values [H, n or 1, n] of the bias, and at which positions, for several lengths, the longest last."""
        if self.table is not None:
            yield self._at(value(self.table).shape[-1])
            return
        heads, shown = 1, 0
        for length in sorted({min(length, limit) for length in SHORT_LENGTHS}):
            entries = self._until_it_ends(shown, length)
            yield entries
            heads, shown = entries[0].shape[0], len(entries[1])
            if shown < length:
                return
        if shown == limit:
            return
        if self.evaluation.is_quadratic and self.evaluation.can_sample:
            try:
                self.evaluation(limit, _block(0, limit))
            except EVALUATION_ERRORS:
                pass  # a table of the model's ends somewhere; see how far it goes
            else:
                for begin in range(0, limit, _BLOCK):
                    yield self._at(limit, _block(begin, limit))
                return
        last = min(limit, int((_MOST_ENTRIES / heads) ** 0.5)) if self.evaluation.is_quadratic else limit
        for length in sorted({last // 3, last}):
            if shown < length:
                entries = self._until_it_ends(shown, length)
                yield entries
                if len(entries[1]) < length:
                    return

    def _until_it_ends(self, shown: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All entries at this length, or at the longest below it that can be evaluated, if ``shown`` can be."""
        try:
            return self._at(length)
        except EVALUATION_ERRORS as error:
            if not shown:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise refuse(self.bias, f"a bias on attention scores could not be evaluated ({reason})") from error
            return self._at(self.evaluation.last_that_runs(shown, length))

    def _at(self, length: int, positions: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.evaluation(length, positions)
        places = torch.arange(length) if positions is None else positions
        if any(size != 1 for size in values.shape[:-3]):
            raise refuse(self.bias, "a bias on attention scores differs between sequences")
        values = values.reshape(values.shape[-3:]) if values.dim() > 3 else values
        while values.dim() < 3:
            values = values[None]
        rows = 1 if values.shape[1] == 1 else len(places)
        values = values.expand(values.shape[0], rows, len(places))
        seen = values if rows == 1 else values.masked_fill(places[None, :] > places[:, None], 0)
        if not bool(values.isfinite().all()):
            raise _Overflow("not finite")
        if float(seen.abs().max()) >= self.largest or float(values.max()) >= self.largest:
            raise _Overflow("as large as the numbers by which the mask forbids")
        return values, places
