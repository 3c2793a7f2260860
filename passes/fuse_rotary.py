"""fuse_rotary: queries and keys are rotated by the attention, on the keys' way to their pages.

before::

    %cos1 = aten.unsqueeze(%cos, 1)                                              # [1, 1, T, D] from [1, T, D]
    %sin1 = aten.unsqueeze(%sin, 1)
    %left = aten.slice(%q, 3, 0, D/2)                                            # %q [1, Hq, T, D]
    %neg  = aten.neg(aten.slice(%q, 3, D/2, 9223372036854775807))
    %rot  = aten.add(aten.mul(%q, %cos1), aten.mul(aten.cat([%neg, %left], -1), %sin1))
    %q1   = aten.squeeze(aten.permute(%rot, [0, 2, 1, 3]), 0)                    # [T, Hq, D], and the same for %k
    %mix  = chunkc.mixed_attention(%q1, %k1, %v1, ..., None, None)

after::

    %cos2 = aten.squeeze(%cos, 0)                                                # [T, D], once for all layers
    %sin2 = aten.squeeze(%sin, 0)
    %q1   = aten.squeeze(aten.permute(%q, [0, 2, 1, 3]), 0)
    %mix  = chunkc.mixed_attention(%q1, %k1, %v1, ..., %cos2, %sin2)

A head may be rotated in its first elements only, the rest joined on behind (``aten.cat``). Left alone: other
rotations (of neighbouring elements, of a head's last elements, of queries only), and, said, rotated values that
something else reads too, queries and keys that are rotated by different angles, and cosines and sines of another dtype
or other than one row a token. All of them where the C++ body does not serve the attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.kernels import cpu_backend, libraries
from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, call, is_call, module_path, same_size, value
from chunkc.passes.page_attention import token_rows

_TABLES = 17  # where a mixed attention's cosines and sines are among its arguments


@dataclass(frozen=True)
class FuseRotary(GraphPass):
    """See the module's text. Ensures ``rotary_fused``."""

    name = "fuse_rotary"
    requires = ("paged",)
    ensures = ("rotary_fused",)
    before = ("split_layers",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Never refuses."""
        graph = graph_module.graph
        graph.eliminate_dead_code()  # page_attention leaves transposes that nothing reads
        skipped: list[Skipped] = []
        tables: dict[fx.Node, fx.Node] = {}
        count = 0
        for attention, q, k in list(_rotated(graph)):
            why = _why_not(attention, q, k)
            if why:
                skipped.append(Skipped(module_path(attention) or attention.name, why))
                continue
            cos, sin = (_table(graph, each, q.heads, attention, tables) for each in (q.cos, q.sin))
            rows = [_rows(graph, each, attention) for each in (q, k)]
            attention.args = (*rows, *attention.args[2:_TABLES], cos, sin)
            count += 1
        graph.eliminate_dead_code()
        return PassReport(count, tuple(skipped))


@dataclass(frozen=True)
class _Rotation:
    """What computes the queries or the keys of an attention.

    Attributes:
        x: [1, H, T, D] or [1, T, H, D], not rotated.
        heads: the dimension of its heads, 1 or 2.
        cos, sin: what its first elements are multiplied by, and those of the other half.
        size: how many elements of a head are rotated.
        chain: from the rotated elements to the attention's argument.
    """

    x: fx.Node
    heads: int
    cos: fx.Node
    sin: fx.Node
    size: int
    chain: tuple[fx.Node, ...]


def _rotated(graph: fx.Graph) -> Iterator[tuple[fx.Node, _Rotation, _Rotation]]:
    """Attentions whose queries and keys are rotated before, in the form that is known."""
    for node in graph.nodes:
        if is_call(node, torch.ops.chunkc.mixed_attention) and node.args[_TABLES:] == (None, None):
            q, k = map(_rotation, node.args[:2])
            if q is not None and k is not None:
                yield node, q, k


def _rotation(rows: fx.Node) -> _Rotation | None:
    if not is_call(rows, aten.squeeze.dim) or rows.args[1] != 0 or value(rows.args[0]).dim() != 4:
        return None
    chain, heads, node = [rows], 2, rows.args[0]
    if is_call(node, aten.permute):
        if list(node.args[1]) != [0, 2, 1, 3]:
            return None
        chain, heads, node = [*chain, node], 1, node.args[0]
    whole = node
    rest = None
    if is_call(node, aten.cat):
        parts = _joined(node)
        if parts is None:
            return None
        chain, (node, rest) = [*chain, node], parts
    found = _turned(node)
    if found is None:
        return None
    x, cos, sin = found
    size = value(x).shape[-1]
    if rest is not None:
        turned, x = x, rest.args[0] if is_call(rest, aten.slice) else None
        if x is None or _span(turned, x) != (0, size) or _span(rest, x) != (size, value(x).shape[-1]):
            return None
    if not _same_shape(value(x).shape, value(whole).shape):
        return None
    return _Rotation(x, heads, cos, sin, size, (*chain, node))


def _turned(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(x, cos, sin), where the node is ``x * cos + (-second half of x, first half of x) * sin``."""
    for straight, crossed in _both_ways(node, aten.add.Tensor):
        for x, cos in _both_ways(straight, aten.mul.Tensor):
            for halves, sin in _both_ways(crossed, aten.mul.Tensor):
                if _are_halves(halves, x):
                    return x, cos, sin
    return None


def _are_halves(node: fx.Node, x: fx.Node) -> bool:
    """Whether the node is x's second half, negative, before its first one."""
    parts = _joined(node) if is_call(node, aten.cat) else None
    size = value(x).shape[-1]
    if parts is None or not is_call(parts[0], aten.neg) or not isinstance(size, int) or size % 2:
        return False
    half = size // 2
    return _span(parts[0].args[0], x) == (half, size) and _span(parts[1], x) == (0, half)


def _joined(cat: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Two values that are joined along the last dimension."""
    dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    rank = value(cat).dim()
    return tuple(cat.args[0]) if len(cat.args[0]) == 2 and dim % rank == rank - 1 else None


def _span(node: fx.Node, x: fx.Node) -> tuple[int, int] | None:
    """First and end of what the node is of the last dimension of x, or None where it is something else."""
    size = value(x).shape[-1]
    if not isinstance(size, int):
        return None
    if node is x:
        return 0, size
    if not is_call(node, aten.slice.Tensor) or node.args[0] is not x or node.kwargs:
        return None
    _, dim, first, end, step = (*node.args, *(x, 0, None, None, 1)[len(node.args) :])
    first, end = 0 if first is None else first, size if end is None else end
    if (
        dim % value(x).dim() != value(x).dim() - 1
        or step != 1
        or not isinstance(first, int)
        or not isinstance(end, int)
    ):
        return None
    return slice(first, end).indices(size)[:2]


def _both_ways(node: fx.Node, operator: Any) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The operands of a sum or a product of two tensors, in both orders."""
    if is_call(node, operator) and len(node.args) == 2 and not node.kwargs:
        first, second = node.args
        if all(isinstance(each, fx.Node) and isinstance(value(each), torch.Tensor) for each in node.args):
            yield first, second
            yield second, first


def _same_shape(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(same_size, one, other))


def _why_not(attention: fx.Node, q: _Rotation, k: _Rotation) -> str | None:
    if (q.cos, q.sin, q.heads, q.size) != (k.cos, k.sin, k.heads, k.size):
        return "its queries are not rotated as its keys are"
    for each in (q, k):
        expected = list(value(each.x).shape)
        expected[each.heads], expected[-1] = 1, each.size
        if expected[0] != 1 or not all(_same_shape(value(table).shape, expected) for table in (each.cos, each.sin)):
            return "its cosines and sines are not one row a token"
        if len({value(node).dtype for node in (each.x, each.cos, each.sin, *each.chain)}) > 1:
            return "its cosines and sines are not of the dtype of what they rotate"
        if any(len(node.users) > 1 for node in each.chain):
            return "what is rotated is used elsewhere too"
    dtype = value(q.x).dtype
    served = dtype in libraries.ATTENTION and cpu_backend.load(dtype)
    return None if served else f"no compiled body of the attention for {dtype} on this machine"


def _table(graph: fx.Graph, factor: fx.Node, heads: int, attention: fx.Node, tables: dict[fx.Node, fx.Node]) -> fx.Node:
    """The cosines or sines as [T, size]: one node for all layers, behind what it is made of."""
    if factor not in tables:
        node, dims = factor, [heads, 0]
        if is_call(factor, aten.unsqueeze) and factor.args[1] % 4 == heads:
            node, dims = factor.args[0], [0]
        computed = node.op == "call_function"
        for dim in dims:
            with graph.inserting_after(node) if computed else graph.inserting_before(attention):
                node = call(graph, aten.squeeze.dim, node, dim, like=factor)
        tables[factor] = node
    return tables[factor]


def _rows(graph: fx.Graph, rotation: _Rotation, attention: fx.Node) -> fx.Node:
    """What is to be rotated as [T, H, D]."""
    with graph.inserting_before(attention):
        if rotation.heads == 1:
            return token_rows(graph, rotation.x, attention)
        return call(graph, aten.squeeze.dim, rotation.x, 0, like=attention)


@register_fact("rotary_fused")
def check_rotary_fused(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No rotation is left that the attention could do."""
    for attention, q, k in _rotated(graph_module.graph):
        require(_why_not(attention, q, k) is not None, f"what {attention.name} attends to is rotated before it")
