"""Takes what is added to attention scores apart: into masks, which forbid, and biases, which do not.

before (one tensor)::

    %alibi = aten.mul(%slopes, %distance)                              # [H, 1, S]
    %bias  = aten.masked_fill(aten.div(%alibi, 8.0), %later, -3.4e38)  # [1, H, S, S]

after::

    masks:  %later (True forbids, by -3.4e38)
    biases: aten.div(%alibi, 8.0)

What cannot be told apart is left whole, as a mask, whose proof then refuses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.passes.attributes import attribute
from chunkc.passes.fx_tools import aten, is_call, rank, symbol_of, value
from chunkc.passes.mask_evaluation import EVALUATION_ERRORS, Evaluation, table_behind
from chunkc.passes.mask_meaning import FORBIDDEN

#: tokens of the sequence that shows what a term is; masks forbid from the second token on
_LENGTH = 7


@dataclass(frozen=True)
class MaskTerm:
    """A mask.

    Attributes:
        node: bool, or numbers to add.
        true_means_masked: of a bool one.
        fill: what forbidden scores are replaced by, or have added; of an additive mask its own numbers tell.
    """

    node: fx.Node
    true_means_masked: bool = False
    fill: float = -math.inf


@dataclass(frozen=True)
class Terms:
    """What is added to scores. ``biases``: numbers that broadcast to [1, H, S, S], none of which forbids."""

    masks: tuple[MaskTerm, ...] = ()
    biases: tuple[fx.Node, ...] = ()

    def __add__(self, other: Terms) -> Terms:
        return Terms(self.masks + other.masks, self.biases + other.biases)


def split_terms(graph_module: fx.GraphModule, node: fx.Node) -> Terms:
    """The terms of a mask argument.

    Args:
        node: bool (True = attend), or numbers added to the scores.

    Raises:
        UnsupportedModelError: it depends on which tokens there are, or on their number.
    """
    if value(node).dtype == torch.bool:
        return Terms(masks=(MaskTerm(node),))
    kind = _kind(graph_module, node)
    if kind == "bias":
        return Terms(biases=(node,))
    if kind == "both":
        parts = _parts(graph_module, node)
        if parts is not None:
            return parts
    return Terms(masks=(MaskTerm(node),))


def _kind(graph_module: fx.GraphModule, node: fx.Node) -> str:
    """ "mask" (nothing but 0 and large negative numbers), "bias" (none of these), "both" or "unknown"."""
    try:
        numbers = Evaluation(graph_module, table_behind(node) or node, "an attention mask")(_LENGTH)
    except EVALUATION_ERRORS:
        return "unknown"
    forbids = numbers <= FORBIDDEN
    if bool(((numbers == 0) | forbids).all()):
        return "mask"
    if not bool((numbers.isfinite() | forbids).all()):
        return "unknown"
    return "both" if bool(forbids.any()) else "bias"


def _parts(graph_module: fx.GraphModule, node: fx.Node) -> Terms | None:
    """The terms of a node that is both, or None where it does not fall apart into a sum."""
    if _keeps_numbers(node) or _adds_front_dimensions(node):
        return split_terms(graph_module, node.args[0])
    if is_call(node, aten.add) and node.kwargs.get("alpha", 1) == 1 and len(node.args) == 2:
        if all(isinstance(part, fx.Node) for part in node.args):
            if not any(value(part).dtype == torch.bool for part in node.args):
                return split_terms(graph_module, node.args[0]) + split_terms(graph_module, node.args[1])
    if is_call(node, aten.masked_fill, aten.where):
        fills = is_call(node, aten.masked_fill)
        condition, first, second = (node.args[1], node.args[2], node.args[0]) if fills else node.args
        for kept, filler, true_means_masked in ((second, first, True), (first, second, False)):
            fill = number_of(graph_module, filler)
            if fill is not None and fill <= FORBIDDEN and isinstance(kept, fx.Node):
                mask = MaskTerm(condition, true_means_masked, fill)
                return Terms(masks=(mask,)) + split_terms(graph_module, kept)
    return None


def _keeps_numbers(node: fx.Node) -> bool:
    """Whether a node is its input, but for rounding to its own dtype."""
    if not is_call(node, aten._to_copy, aten.clone) or not value(node.args[0]).is_floating_point():
        return False
    # what was rounded and then widened is not what the wider dtype promises
    return torch.finfo(value(node).dtype).eps >= torch.finfo(value(node.args[0]).dtype).eps


def _adds_front_dimensions(node: fx.Node) -> bool:
    """Whether a node has the dimensions of its input, sizes of 1 in front or expanded ones aside."""
    if is_call(node, aten.unsqueeze):
        return node.args[1] in (0, -rank(node))
    if not is_call(node, aten.expand, aten.reshape):
        return False
    before, after = value(node.args[0]).shape, value(node).shape
    if is_call(node, aten.expand):
        return _sizes(before[-2:]) == _sizes(after[-2:])
    return _sizes(before) == _sizes(after)[-len(before) :] and all(size == 1 for size in after[: -len(before)])


def _sizes(shape: Any) -> list[Any]:
    return [size if symbol_of(size) is None else symbol_of(size) for size in shape]


def number_of(graph_module: fx.GraphModule, argument: Any) -> float | None:
    """The number that an argument is: a constant of the graph, or None where it is computed."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return float(argument)
    if isinstance(argument, fx.Node) and argument.op == "get_attr":
        tensor = attribute(graph_module, argument.target)
        return float(tensor) if tensor.numel() == 1 else None
    if is_call(argument, aten.full, aten.scalar_tensor) and value(argument).numel() == 1:
        number = argument.args[1 if is_call(argument, aten.full) else 0]
        return float(number) if isinstance(number, (int, float)) else None
    if is_call(argument, aten._to_copy, aten.lift_fresh_copy):
        return number_of(graph_module, argument.args[0])
    return None
