"""Finds attention written out by hand: ``softmax(q @ k.T * scale [capped] + mask) @ v``.

The scores are followed from the softmax back to the product of query and key. Every op on the way must be one
that is understood; its numbers (an odd scale, a softcap) are read off the graph, not assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from chunkc.passes.additive_terms import MaskTerm, number_of
from chunkc.passes.fx_tools import aten, is_call, refuse, same_size, symbol_of, value

_MATMUL = (aten.matmul, aten.bmm)
_SCORES = (*_MATMUL, aten.baddbmm)
#: why what is scaled together with the scores must not forbid: its numbers are no longer large
SCALED_AFTER_MASK = "attention scores are scaled after the mask"
_CASTS = (aten._to_copy, aten.type_as, aten.clone)


@dataclass(frozen=True)
class Added:
    """A mask or a bias.

    Attributes:
        node: numbers that broadcast to [1, H, S, S].
        factor: they are multiplied with it on the way to the scores.
        scaled_by: the step that does so last, where they are subtracted or scaled together with the scores.
    """

    node: fx.Node
    factor: float = 1.0
    scaled_by: fx.Node | None = None


@dataclass(frozen=True)
class EagerAttention:
    """One attention written out.

    Attributes:
        output: the product of probabilities and values, [1, H, S, Dv] or [H, S, Dv].
        query: [1, H, S, Dk] or [H, S, Dk].
        key_transposed: [1, H, Dk, S] or [H, Dk, S].
        value: [1, H, S, Dv] or [H, S, Dv].
        masks: what scores are replaced by where.
        added: what is added to scores.
        scale, softcap: as in ``chunkc::attention``.
    """

    output: fx.Node
    query: fx.Node
    key_transposed: fx.Node
    value: fx.Node
    masks: tuple[MaskTerm, ...]
    added: tuple[Added, ...]
    scale: float
    softcap: float


@dataclass
class _Scores:
    """What was read between the product of query and key and the softmax, from the inside out."""

    scale: float = 1.0
    softcap: float = 0.0
    capped: bool = False  # tanh was seen, the factor after it is the cap
    masks: list[MaskTerm] = field(default_factory=list)
    added: list[Added] = field(default_factory=list)


def match_eager(graph_module: fx.GraphModule, softmax: fx.Node) -> EagerAttention | None:
    """The attention around a softmax, or None where it is not the softmax of an attention.

    Raises:
        UnsupportedModelError: it is one, but with a step that is not understood.
    """
    output = _product_with_values(softmax)
    if output is None:
        return None
    path, product = _path_to_product(softmax)
    if product is None:
        raise refuse(
            softmax,
            "a softmax over the sequence whose scores are not a product of query and key "
            f"with known steps after it (stopped at {path[-1][0].target if path else 'its input'})",
        )
    axis = softmax.args[1]
    if axis not in (-1, value(softmax).dim() - 1):
        raise refuse(softmax, "an attention softmax that does not run over the keys")
    scores = _Scores()
    query, key_transposed = product.args[0], product.args[1]
    if is_call(product, aten.baddbmm):
        query, key_transposed = product.args[1], product.args[2]
        scores.scale = float(product.kwargs.get("alpha", 1))
        beta = float(product.kwargs.get("beta", 1))
        if scores.scale <= 0:
            raise refuse(product, "attention scores are multiplied by something other than a positive number")
        if beta:  # with 0 the first argument is memory that nobody reads
            scores.added.append(Added(product.args[0], beta, product))
    for node, through in reversed(path):
        _read(graph_module, scores, node, through)
    if scores.capped and not scores.softcap:
        raise refuse(softmax, "attention scores go through tanh without the softcap's factor after it")
    return EagerAttention(
        output=output,
        query=query,
        key_transposed=key_transposed,
        value=output.args[1],
        masks=tuple(scores.masks),
        added=tuple(scores.added),
        scale=scores.scale,
        softcap=scores.softcap,
    )


def _product_with_values(softmax: fx.Node) -> fx.Node | None:
    """The matmul that takes the probabilities, if they are probabilities over the sequence."""
    shape = value(softmax).shape
    if symbol_of(shape[-1]) is None or len(shape) < 3 or symbol_of(shape[-2]) is None:
        return None
    node = softmax
    while True:
        users = list(node.users)
        products = [user for user in users if is_call(user, *_MATMUL) and user.args[0] is node]
        if products:
            return products[0]
        if len(users) != 1 or not is_call(users[0], *_CASTS, aten.expand, aten.reshape):
            return None
        node = users[0]


def _path_to_product(softmax: fx.Node) -> tuple[list[tuple[fx.Node, int]], fx.Node | None]:
    """Steps from the softmax back to query @ key: (node, index of the argument that carries the scores)."""
    path: list[tuple[fx.Node, int]] = []
    node = softmax.args[0]
    while True:
        if is_call(node, *_SCORES):
            return path, node
        through = _carrier(node)
        if through is None:
            return path, None
        path.append((node, through))
        node = node.args[through]


def _carrier(node: Any) -> int | None:
    """Which argument of this step is the scores: the one that leads to a product."""
    if not isinstance(node, fx.Node):
        return None
    if is_call(node, *_CASTS, aten.expand, aten.reshape, aten.tanh, aten.masked_fill):
        return 0
    if is_call(node, aten.mul, aten.div):
        return 1 if not _leads_to_product(node.args[0]) and not is_call(node, aten.div) else 0
    if is_call(node, aten.sub):
        return 0
    if is_call(node, aten.add):
        return 0 if _leads_to_product(node.args[0]) else 1
    if is_call(node, aten.where):
        return 1 if _leads_to_product(node.args[1]) else 2
    return None


def _leads_to_product(node: Any, depth: int = 12) -> bool:
    while isinstance(node, fx.Node) and depth:
        if is_call(node, *_SCORES):
            return True
        known = (*_CASTS, aten.expand, aten.reshape, aten.tanh, aten.masked_fill, aten.mul, aten.div, aten.sub)
        if is_call(node, *known):
            node = node.args[0]
        elif is_call(node, aten.add, aten.where):
            first = 1 if is_call(node, aten.where) else 0
            return any(_leads_to_product(other, depth - 1) for other in node.args[first : first + 2])
        else:
            return False
        depth -= 1
    return False


def _read(graph_module: fx.GraphModule, scores: _Scores, node: fx.Node, through: int) -> None:
    """Take one step, from the inside out, into account."""
    if is_call(node, *_CASTS):
        return
    if is_call(node, aten.expand, aten.reshape):
        before, after = value(node.args[0]).shape[-2:], value(node).shape[-2:]
        if not all(same_size(a, b) for a, b in zip(before, after, strict=True)):
            raise refuse(node, "attention scores are reshaped across the sequence")
        return
    if is_call(node, aten.tanh):
        if scores.capped or scores.masks or scores.added:
            raise refuse(node, "attention scores go through tanh twice, or after the mask")
        scores.capped = True
        return
    if is_call(node, aten.mul, aten.div):
        if node.kwargs:
            raise refuse(node, "attention scores are rounded")
        factor = number_of(graph_module, node.args[1 - through])
        if factor is None or factor <= 0:
            raise refuse(node, "attention scores are multiplied by something other than a positive number")
        if scores.masks or (scores.capped and scores.added):
            raise refuse(node, SCALED_AFTER_MASK)
        factor = 1.0 / factor if is_call(node, aten.div) else factor
        scores.added = [Added(added.node, added.factor * factor, node) for added in scores.added]
        if scores.capped and not scores.softcap:
            scores.softcap = factor
            scores.scale *= factor  # tanh(scale' * qk) * cap: the kernel divides by the cap itself
        elif scores.capped:
            raise refuse(node, "attention scores are scaled after their softcap")
        else:
            scores.scale *= factor
        return
    if is_call(node, aten.add, aten.sub):
        other = node.args[1 - through]
        if len(node.args) > 2 or node.kwargs.get("alpha", 1) != 1 or not isinstance(other, fx.Node):
            raise refuse(node, "a number is added to attention scores")
        if value(other).dtype == torch.bool:
            raise refuse(node, "a boolean mask is added to attention scores")
        scores.added.append(Added(other, -1.0, node) if is_call(node, aten.sub) else Added(other))
        return
    if is_call(node, aten.where, aten.masked_fill):
        condition = node.args[0] if is_call(node, aten.where) else node.args[1]
        inverted = is_call(node, aten.masked_fill) or through == 2
        filler_at = 2 if is_call(node, aten.masked_fill) or through == 1 else 1
        filler = number_of(graph_module, node.args[filler_at])
        if filler is None or filler > -1e4:
            raise refuse(node, "attention scores are replaced by something other than a large negative number")
        scores.masks.append(MaskTerm(condition, inverted, filler))
        return
    raise refuse(node, "a step between attention scores and softmax that is not known")
