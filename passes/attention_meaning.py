"""What all that is added to the scores of one attention means together: a causal mask, and maybe ALiBi's slopes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.errors import UnsupportedModelError
from chunkc.passes.additive_terms import MaskTerm
from chunkc.passes.base import PassContext
from chunkc.passes.fx_tools import refuse
from chunkc.passes.mask_meaning import FORBIDDEN, MaskMeaning, prove_mask
from chunkc.passes.position_bias import PositionBias, prove_alibi

NOT_CAUSAL = "attention without a causal mask lets tokens see later tokens"
CAUSAL_HINT = "Only causal attention can be served in chunks."


@dataclass(frozen=True)
class Meaning:
    """What is added to scores: a causal mask, see ``MaskMeaning``, and a bias.

    Attributes:
        window, chunk: in tokens, 0 for none.
        slopes: ALiBi's, float32 [Hq], or None.
        is_zero_at_own: whether the bias is 0 at each query's own key, as the operator's is. Else it is so but for
            something that all keys of a query share.
    """

    window: int = 0
    chunk: int = 0
    slopes: torch.Tensor | None = None
    is_zero_at_own: bool = True


class Proofs:
    """Proves each mask and bias once, however many layers share it, and keeps what was found."""

    def __init__(self, graph_module: fx.GraphModule, context: PassContext) -> None:
        self.graph_module = graph_module
        self.context = context
        self.masks: dict[tuple[fx.Node, bool], MaskMeaning] = {}
        self.biases: dict[tuple[fx.Node, torch.dtype, float], PositionBias] = {}
        self.hints = set(_sizes_in(context.config))

    def meaning(
        self,
        attention: fx.Node,
        heads: int,
        dtype: torch.dtype,
        masks: Sequence[MaskTerm],
        biases: Sequence[tuple[fx.Node, float]] = (),
    ) -> Meaning:
        """What terms mean together.

        Args:
            attention: the node that errors name.
            heads: query heads.
            dtype: of the queries.
            masks: all of them must mean the same family.
            biases: each with the factor that it is multiplied with.

        Raises:
            UnsupportedModelError: they are not a causal mask and ALiBi.
        """
        meanings = [self._mask(mask) for mask in masks]
        if not meanings:
            raise refuse(attention, NOT_CAUSAL, CAUSAL_HINT)
        windows = [m.window for m in meanings if m.window]
        chunks = [m.chunk for m in meanings if m.chunk]
        if len(set(chunks)) > 1:
            raise refuse(attention, "attention masks with two different chunk sizes")
        window, chunk = min(windows, default=0), chunks[0] if chunks else 0
        weakest = max(*(m.weakest for m in meanings), *(mask.fill for mask in masks))
        # a key that is forbidden must stay far below the query's own, whatever the bias adds to either
        largest = (FORBIDDEN - weakest) / 2 / max(1, len(biases))
        slopes, is_zero_at_own = torch.zeros(heads), True
        for node, factor in biases:
            found = self._bias(node, dtype, largest / abs(factor))
            if len(found.slopes) not in (1, heads):
                raise refuse(node, f"a bias on attention scores has {len(found.slopes)} heads, the queries {heads}")
            slopes = slopes + found.slopes * factor
            is_zero_at_own &= found.is_zero_at_own
        return Meaning(window, chunk, slopes if bool(slopes.any()) else None, is_zero_at_own)

    def notes(self) -> Iterator[str]:
        """What was found, in words."""
        for (mask, _), meaning in self.masks.items():
            kind = "causal"
            if meaning.window:
                kind += f", window {meaning.window}"
            if meaning.chunk:
                kind += f", chunk {meaning.chunk}"
            yield f"mask {mask.name} is proven {kind}{_so_far(meaning.proven_length)}"
        for (bias, *_), found in self.biases.items():
            low, high = found.slopes.min(), found.slopes.max()
            yield f"bias {bias.name} is proven ALiBi, slopes {low:.3g} to {high:.3g}{_so_far(found.proven_length)}"

    def _mask(self, term: MaskTerm) -> MaskMeaning:
        key = (term.node, term.true_means_masked)
        if key not in self.masks:
            self.masks[key] = prove_mask(
                self.graph_module,
                term.node,
                longest=self.context.max_positions,
                hints=self.hints,
                true_means_masked=term.true_means_masked,
            )
            self._limit(self.masks[key].proven_length)
        return self.masks[key]

    def _bias(self, node: fx.Node, dtype: torch.dtype, largest: float) -> PositionBias:
        key = (node, dtype, largest)
        if key not in self.biases:
            self.biases[key] = prove_alibi(
                self.graph_module, node, longest=self.context.max_positions, dtype=dtype, largest=largest
            )
            self._limit(self.biases[key].proven_length)
        return self.biases[key]

    def _limit(self, length: int | None) -> None:
        if length is not None:
            self.context.proven_length = min(self.context.proven_length or length, length)


def refuse_other_code(context: PassContext) -> None:
    """Refuse a bias in attention that the model computes itself, where it was told of an attention it does not know.

    A model that does not ask transformers for its attention may take another path through its code for a name that it
    does not know, and add its bias otherwise there. It is to be captured as it stands.

    Raises:
        UnsupportedModelError: it was captured by the interface.
    """
    if context.route == "interface":
        raise UnsupportedModelError("a position bias in attention that does not go through transformers' interface")


def _so_far(length: int | None) -> str:
    return f" (up to {length} tokens)" if length else ""


def _sizes_in(config: Any) -> Iterator[int]:
    """Sizes of windows and chunks that a configuration names."""
    if config is None:
        return
    configs = [config]
    text = getattr(config, "get_text_config", None)
    if callable(text):
        configs.append(text())
    for each in configs:
        for name, size in vars(each).items():
            if isinstance(size, int) and not isinstance(size, bool) and ("window" in name or "chunk" in name):
                yield size
