"""Small helpers on FX graphs that several passes need."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._sympy.functions import FloorDiv

import chunkc.kernels.ops  # noqa: F401  (registers chunkc::attention, which passes name)
from chunkc.errors import UnsupportedModelError
from chunkc.passes.attributes import MODEL_ATTRIBUTE

aten = torch.ops.aten

_size_numbers = itertools.count()


def is_call(node: Any, *targets: Any) -> bool:
    """Whether ``node`` is a call of one of the given overloads, overload packets or functions."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target in targets or getattr(node.target, "overloadpacket", None) in targets


def op_name(node: fx.Node) -> str:
    """Readable name of what a node calls: ``aten.conv1d.default``."""
    return str(node.target)


def module_path(node: fx.Node) -> str:
    """Path of the innermost module whose code made this node, as in ``model.named_modules()``."""
    stack = node.meta.get("nn_module_stack") or {}
    path = ""
    for entry in stack.values():
        if entry[0] and not entry[0].startswith("_empty_nn_module_stack"):
            path = entry[0]
    for prefix in (f"L['self'].{MODEL_ATTRIBUTE}", MODEL_ATTRIBUTE):
        if path == prefix or path.startswith(prefix + "."):
            return path[len(prefix) + 1 :]
    return path


def refuse(node: fx.Node, reason: str, hint: str | None = None) -> UnsupportedModelError:
    """The error that names a node's op and module. To be raised by the caller."""
    return UnsupportedModelError(reason, op=op_name(node), module=module_path(node), hint=hint)


def value(node: Any) -> Any:
    """The fake value that a node computes (tensor, SymInt or tuple); constants stand for themselves."""
    return node.meta["val"] if isinstance(node, fx.Node) else node


def rank(node: fx.Node) -> int:
    """Number of dimensions of the tensor that a node computes."""
    return value(node).dim()


def placeholders(graph: fx.Graph) -> dict[str, fx.Node]:
    """The graph's inputs by name, in order."""
    return {node.target: node for node in graph.nodes if node.op == "placeholder"}


def output_node(graph: fx.Graph) -> fx.Node:
    """The graph's only output value."""
    result = graph.output_node().args[0]
    if isinstance(result, (tuple, list)):
        (result,) = result
    return result


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """The fake tensor mode in which the graph was traced; new values must come from the same one."""
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), FakeTensor):
            return node.meta["val"].fake_mode
    raise ValueError("the graph has no placeholder with a fake value")


def new_size(graph: fx.Graph, name: str, hint: int) -> torch.SymInt:
    """A fresh dynamic size called ``name``, whose value during tracing is ``hint``."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    env = fake_mode_of(graph).shape_env
    source = ConstantSource(f"__chunkc_{name}_{next(_size_numbers)}")
    symbol = env.create_symbol(
        hint,
        source,
        dynamic_dim=DimDynamic.DYNAMIC,
        constraint_dim=None,
        do_not_specialize_zero_one=True,  # a batch of one request, or without merges, is a batch like any other
    )
    return env.create_symintnode(symbol, hint=hint, source=source)


def add_placeholder(graph: fx.Graph, name: str, shape: Iterable[int | torch.SymInt], dtype: torch.dtype) -> fx.Node:
    """Add a graph input after those that exist, with a fake value of the given shape and dtype."""
    last = list(placeholders(graph).values())[-1]
    with graph.inserting_after(last):
        node = graph.placeholder(name)
    with fake_mode_of(graph):
        node.meta["val"] = torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return node


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Insert a call; origin (module path, stack trace) is taken from ``like`` so that messages stay useful."""
    node = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            node.meta[key] = like.meta[key]
    return node


#: where a call that adds a residual keeps the module that made what it is added to
_ABSORBED = "chunkc_absorbed"


def mark_absorbed(node: fx.Node, linear: fx.Node) -> None:
    """Note that a ``chunkc::fused_linear`` adds a residual to what another node computed."""
    node.meta[_ABSORBED] = module_path(linear)


def absorbed_modules(node: fx.Node) -> list[str]:
    """Paths of the modules whose output is what a node adds a residual to, and is nowhere in the graph."""
    inner = node.meta.get(_ABSORBED)
    if not inner:
        return []
    parts = inner.split(".")
    paths = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    own = module_path(node)
    return [path for path in paths if not f"{own}.".startswith(f"{path}.")]


def symbol_of(size: int | torch.SymInt) -> Any:
    """The sympy expression of a dynamic size, or None where it is a plain number."""
    return size.node.expr if isinstance(size, torch.SymInt) else None


def same_size(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two sizes are equal for every number of tokens, as expressions: ``S * S // S`` is S."""
    return bool(_without_floors(a) == _without_floors(b))


def _without_floors(size: int | torch.SymInt) -> Any:
    """The size as an expression; a division that leaves no rest is one of polynomials."""
    expression = symbol_of(size)
    if expression is None:
        return sympy.Integer(size)

    def divided(base: Any, divisor: Any) -> Any:
        quotient = sympy.cancel(base / divisor)
        symbols = sorted(quotient.free_symbols, key=str)
        exact = quotient.is_Integer or (
            bool(symbols)
            and quotient.is_polynomial(*symbols)
            and all(c.is_Integer for c in sympy.Poly(quotient, *symbols).coeffs())
        )
        return quotient if exact else FloorDiv(base, divisor)

    return sympy.expand(expression.replace(FloorDiv, divided))
