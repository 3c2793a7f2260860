"""canonicalize: one spelling for what export spells in several ways.

Drops assertions, copies and conversions that change nothing, dead code; merges equal subexpressions; turns
``view`` into ``reshape``, since later passes change strides, and a product with a transposed weight into ``linear``.
A ``squeeze`` of whatever has size 1 names its dimensions: in a batch of one token the tokens have size 1 too.

before::

    %assert   = aten._assert_tensor_metadata(%x, dtype=torch.float32)
    %same     = aten._to_copy(%x, dtype=torch.float32)        # x is float32 already
    %a        = aten.view(%same, [1, %s, 4, 16])
    %b        = aten.view(%x, [1, %s, 4, 16])
    %unused   = aten.mul(%x, 2)

after::

    %a        = aten.reshape(%x, [1, %s, 4, 16])              # also stands for %b
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, is_call, refuse, symbol_of, value

_ASSERTIONS = (
    aten._assert_tensor_metadata,
    aten._assert_scalar,
    aten._assert_async,
    aten.sym_constrain_range,
    aten.sym_constrain_range_for_size,
)
#: single-input ops that give their input back where dtype, device and shape stay the same
_MAYBE_IDENTITY = (
    aten._to_copy,
    aten.to,
    aten.alias,
    aten.detach,
    aten.detach_,
    aten.clone,
    aten.contiguous,
    aten.lift_fresh_copy,
    aten.lift_fresh,
    aten.expand,
    aten.view,
    aten.reshape,
    aten.slice,
    aten.type_as,
)


@dataclass(frozen=True)
class Canonicalize(GraphPass):
    """See the module's text. Ensures ``canonical``."""

    name = "canonicalize"
    ensures = ("canonical",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Raises UnsupportedModelError for an op that draws random numbers or writes into its input."""
        graph = graph_module.graph
        matches = 0
        for node in list(graph.nodes):
            if is_call(node, *_ASSERTIONS):
                graph.erase_node(node)
                matches += 1
            elif _is_identity(node):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                matches += 1
            elif is_call(node, aten.view.default, aten._unsafe_view.default):
                node.target = aten.reshape.default
                matches += 1
            elif is_call(node, aten.squeeze.default):
                node.target = aten.squeeze.dims
                node.args = (
                    node.args[0],
                    [
                        dim
                        for dim, size in enumerate(value(node.args[0]).shape)
                        if symbol_of(size) is None and size == 1
                    ],
                )
                matches += 1
            elif is_call(node, aten.matmul.default, aten.mm.default) and _transposed_weight(node.args[1]) is not None:
                node.target = aten.linear.default
                node.args = (node.args[0], _transposed_weight(node.args[1]))
                matches += 1
        matches += _merge_equal(graph)
        graph.eliminate_dead_code()
        for node in graph.nodes:
            _check_pure(node)
        return PassReport(matches)


def _transposed_weight(node: fx.Node) -> fx.Node | None:
    """The weight [N, K] that ``node`` is the transpose of, or None."""
    if is_call(node, aten.t, aten.numpy_T):
        swaps = True
    elif is_call(node, aten.permute):
        swaps = [dim % 2 for dim in node.args[1]] == [1, 0]
    elif is_call(node, aten.transpose):
        swaps = {dim % 2 for dim in node.args[1:]} == {0, 1}
    else:
        return None
    weight = node.args[0]
    return weight if swaps and weight.op == "get_attr" and value(weight).dim() == 2 else None


def _is_identity(node: fx.Node) -> bool:
    if is_call(node, aten.dropout):
        return node.args[1] == 0 or not node.args[2]
    if not is_call(node, *_MAYBE_IDENTITY):
        return False
    before, after = value(node.args[0]), value(node)
    if not isinstance(before, torch.Tensor) or before.dim() != after.dim():
        return False
    same_shape = all(_same_size(a, b) for a, b in zip(before.shape, after.shape, strict=True))
    return same_shape and before.dtype == after.dtype and before.device == after.device


def _same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are the same expression (not merely equal for the traced example)."""
    a_expr = a.node.expr if isinstance(a, torch.SymInt) else a
    b_expr = b.node.expr if isinstance(b, torch.SymInt) else b
    return bool(a_expr == b_expr)


def _merge_equal(graph: fx.Graph) -> int:
    """Merge calls and attributes that compute the same value. Returns how many went away."""
    seen: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op == "get_attr":
            key: Any = ("get_attr", node.target)
        elif node.op == "call_function" and not node.is_impure():
            key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        else:
            continue
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
            merged += 1
    return merged


def _freeze(argument: Any) -> Any:
    """A hashable stand-in; numbers keep their type, since 1, 1.0 and True are not the same argument."""
    if isinstance(argument, (list, tuple)):
        return ("seq", *(_freeze(item) for item in argument))
    if isinstance(argument, dict):
        return ("map", *((key, _freeze(item)) for key, item in sorted(argument.items())))
    if isinstance(argument, slice):
        return ("slice", _freeze(argument.start), _freeze(argument.stop), _freeze(argument.step))
    if isinstance(argument, fx.Node):
        return argument
    return (type(argument), repr(argument))


def _check_pure(node: fx.Node) -> None:
    if node.op in ("call_module", "call_method"):
        raise refuse(node, "the captured graph calls a module or method instead of an operator")
    if node.op != "call_function" or node.target is operator.getitem:
        return
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable and not str(node.target).startswith("chunkc."):
        raise refuse(node, "an operator writes into one of its inputs")
    # attention's own dropout is recognize_attention's to judge; it knows the argument
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    if random and not is_call(node, aten.scaled_dot_product_attention):
        raise refuse(node, "an operator draws random numbers", "Only deterministic models (dropout off) can be served.")


@register_fact("canonical")
def check_canonical(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No assertion, no ``view``, and no op but ours that writes into its input."""
    for node in graph_module.graph.nodes:
        require(not is_call(node, *_ASSERTIONS), f"{node.name} is an assertion")
        require(not is_call(node, aten.view.default, aten._unsafe_view.default), f"{node.name} is a view")
        _check_pure(node)
