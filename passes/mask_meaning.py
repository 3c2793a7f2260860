"""What an attention mask means, proven by evaluating the code that computes it.

A captured graph computes its masks from index ranges and positions. We run that part of the graph on real numbers
and compare the result, entry by entry, with the masks that the kernels can do: causal, causal with a sliding
window, causal in chunks. Anything else is refused.

Short sequences are evaluated whole. A window of 4096 does not show in 133 tokens, so long ones are evaluated too,
up to the model's longest: at a few hundred sampled positions where that is sound (``mask_sampling``), among them the
neighbours of every window or chunk size that the configuration names or that the samples show. Elsewhere (``tril``)
the mask is evaluated whole up to ``FULL_LIMIT`` and its meaning counts as proven only that far.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from chunkc.passes.fx_tools import refuse
from chunkc.passes.mask_evaluation import EVALUATION_ERRORS, Evaluation
from chunkc.passes.mask_sampling import first_hidden, positions_around

#: longest sequence whose mask is evaluated entry by entry (16.8 M entries)
FULL_LIMIT = 4096
#: lengths always evaluated whole
SHORT_LENGTHS = (1, 2, 37, 133)
#: an additive mask forbids with values at or below this; float16's lowest number is -65504
FORBIDDEN = -1e4
#: taken as the longest sequence of a model that does not name one
DEFAULT_LONGEST = 131072


@dataclass(frozen=True)
class MaskMeaning:
    """A causal mask: query i sees key j iff j <= i, and i - j < window, and i // chunk == j // chunk.

    Attributes:
        window: sliding window in tokens, 0 for none.
        chunk: chunk size in tokens, 0 for none.
        proven_length: longest sequence for which this is proven, in tokens; None for the model's longest.
        weakest: the largest of the numbers by which an additive mask forbids; -inf for a bool mask.
    """

    window: int = 0
    chunk: int = 0
    proven_length: int | None = None
    weakest: float = field(default=-math.inf, compare=False)

    def allowed(self, positions: torch.Tensor) -> torch.Tensor:
        """The mask of this meaning at ``positions`` int64 [n]: bool [n, n], True where query i sees key j."""
        distance = positions[:, None] - positions[None, :]
        mask = distance >= 0
        if self.window:
            mask &= distance < self.window
        if self.chunk:
            mask &= positions[:, None] // self.chunk == positions[None, :] // self.chunk
        return mask


def prove_mask(
    graph_module: fx.GraphModule,
    mask: fx.Node,
    *,
    longest: int | None,
    hints: Iterable[int] = (),
    true_means_masked: bool = False,
) -> MaskMeaning:
    """Find the meaning of a mask.

    Args:
        mask: node computing a bool (True = attend) or additive float mask that broadcasts to [1, H, S, S].
        longest: longest sequence the model is defined for, in tokens, or None.
        hints: sizes to look at closely (window and chunk sizes of the configuration).
        true_means_masked: for a bool mask, True = do not attend.

    Raises:
        UnsupportedModelError: the mask depends on the tokens, differs between heads, biases scores, is not causal,
            or is none of the three kinds.
    """
    return _Prover(graph_module, mask, longest or DEFAULT_LONGEST, sorted(set(hints)), true_means_masked).prove()


class _Prover:
    def __init__(
        self, graph_module: fx.GraphModule, mask: fx.Node, longest: int, hints: list[int], inverted: bool
    ) -> None:
        self.mask = mask
        self.longest = longest
        self.hints = [hint for hint in hints if 1 < hint < longest]
        self.inverted = inverted
        self.evaluation = Evaluation(graph_module, mask, "an attention mask")
        self.weakest = -math.inf

    def prove(self) -> MaskMeaning:
        return replace(self._prove(), weakest=self.weakest)

    def _prove(self) -> MaskMeaning:
        by_samples = self.longest > SHORT_LENGTHS[-1] and self.evaluation.can_sample
        if by_samples:
            short = self._prove_whole(SHORT_LENGTHS[-1])
            try:
                return self._prove_by_samples(replace(short, proven_length=None))
            except EVALUATION_ERRORS:
                pass  # a table of the model's ends somewhere; see how far it goes
        return self._prove_whole(FULL_LIMIT)

    def _prove_whole(self, limit: int) -> MaskMeaning:
        """Evaluate every entry, for growing lengths."""
        found, shown = MaskMeaning(), 0
        for length in self._lengths(limit):
            try:
                allowed = self._evaluate(length)
            except EVALUATION_ERRORS as error:
                if not shown:
                    reason = str(error).strip().partition("\n")[0] or type(error).__name__
                    raise refuse(self.mask, f"an attention mask could not be evaluated ({reason})") from error
                shown = self.evaluation.last_that_runs(shown, length)
                found = self._agree(found, self._evaluate(shown), torch.arange(shown))
                break
            found, shown = self._agree(found, allowed, torch.arange(length)), length
        return replace(found, proven_length=shown if shown < self.longest else None)

    def _lengths(self, limit: int) -> list[int]:
        """Lengths to evaluate whole, in order; the last is the longest sequence or the limit."""
        last = min(self.longest, limit)
        doubled = (256 << i for i in range(12))
        return sorted({last, *(length for length in (*SHORT_LENGTHS, *doubled) if length < last)})

    def _prove_by_samples(self, found: MaskMeaning) -> MaskMeaning:
        last = self.longest - 1
        wanted = {*range(64), *range(max(0, last - 63), last + 1), *range(0, last, max(1, last // 256))}
        for size in {*self.hints, found.window, found.chunk} - {0}:
            wanted |= positions_around(size, last)
        while True:
            positions = torch.tensor(sorted(p for p in wanted if 0 <= p <= last))
            allowed = self._evaluate(self.longest, positions)
            more = first_hidden(allowed, positions) - wanted
            if not more:
                return self._agree(found, allowed, positions)
            wanted |= more

    def _agree(self, found: MaskMeaning, allowed: torch.Tensor, positions: torch.Tensor) -> MaskMeaning:
        """The meaning of ``allowed``, which must be, or refine, what shorter sequences showed."""
        if torch.equal(found.allowed(positions), allowed):
            return found
        if bool((allowed & (positions[:, None] < positions[None, :])).any()):
            raise refuse(
                self.mask,
                "an attention mask lets tokens see later tokens",
                "Only causal attention can be served in chunks.",
            )
        # a size that longer sequences bring to light; one already seen cannot change
        if not found.window and not found.chunk:
            for candidate in self._candidates(allowed, positions):
                if torch.equal(candidate.allowed(positions), allowed):
                    return candidate
        raise refuse(
            self.mask,
            "an attention mask is neither causal, causal with a sliding window, nor causal in chunks",
            f"First difference at a sequence of {int(positions[-1]) + 1} tokens.",
        )

    def _candidates(self, allowed: torch.Tensor, positions: torch.Tensor) -> list[MaskMeaning]:
        """With a window as with chunks, the first query that does not see the first key shows the size."""
        hidden = (~allowed[:, 0]).nonzero()
        if not len(hidden):
            return []
        size = int(positions[hidden[0, 0]])
        return [MaskMeaning(window=size), MaskMeaning(chunk=size)]

    def _evaluate(self, length: int, positions: torch.Tensor | None = None) -> torch.Tensor:
        """The mask for one sequence of ``length`` tokens, or its entries at ``positions``: bool [n, n]."""
        rows = length if positions is None else len(positions)
        result = self.evaluation(length, positions)
        if result.dim() < 2:
            raise refuse(self.mask, "an attention mask has fewer than two dimensions")
        once = [slice(1) if result.stride(dim) == 0 else slice(None) for dim in range(result.dim() - 2)]
        result = result[tuple(once)]  # not a copy for each head that it is expanded to
        result = result.expand(*result.shape[:-2], rows, rows).reshape(-1, rows, rows)
        if not bool((result[1:] == result[:1]).all()):
            raise refuse(
                self.mask,
                "an attention mask differs between heads",
                "Of what differs between heads, only ALiBi is supported, added to a mask that they share.",
            )
        return self._as_allowed(result[0])

    def _as_allowed(self, mask: torch.Tensor) -> torch.Tensor:
        if mask.dtype == torch.bool:
            return ~mask if self.inverted else mask
        allowed, forbidden = mask == 0, mask <= FORBIDDEN
        if not bool((allowed | forbidden).all()):
            raise refuse(
                self.mask,
                "an attention mask adds a bias to the scores instead of only allowing or forbidding",
                "Of position biases, only ALiBi is supported, added to a mask.",
            )
        if bool(forbidden.any()):
            self.weakest = max(self.weakest, float(mask[forbidden].max()))
        return allowed
