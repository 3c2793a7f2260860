"""fuse_gates: a merged linear of gates and of what they let through hands out what comes of it.

before::

    %gate_up = aten.linear(%h, %fused_linear_1_weight)                            # [1, T, 3072]
    %parts   = aten.split_with_sizes(%gate_up, [1536, 1536], -1)
    %gate, %up = getitem(%parts, 0), getitem(%parts, 1)
    %act     = aten.silu(%gate)
    %mlp     = aten.mul(%act, %up)                                                # [1, T, 1536]

after::

    %mlp     = chunkc.fused_linear(%h, %gated_linear_0, None, 1536, None, 0.0, SILU, None)

``silu`` and ``gelu`` with ``tanh`` are fused; the first half of the columns must be the gates. The weight is packed
here, in another order than ``pack_linears`` would pack it. Left alone, and said: halves that are no multiple of 8
columns, a weight that is computed or used elsewhere too, and all of them where oneDNN multiplies.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from chunkc.kernels.fused_linear import TURN, Activation
from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, is_call, module_path, rank, value
from chunkc.passes.linear_calls import LinearCall, why_not_ours
from chunkc.passes.made_tensors import Packed
from chunkc.passes.register_made import register
from chunkc.passes.unused import drop_unused_tensors


@dataclass(frozen=True)
class FuseGates(GraphPass):
    """See the module's text. Ensures ``gates_fused``."""

    name = "fuse_gates"
    requires = ("linears_fused",)
    ensures = ("gates_fused",)
    before = ("pack_linears",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Never refuses. The packed weights are appended to ``context.resources``; keep them while the graph runs."""
        graph = graph_module.graph
        skipped: list[Skipped] = []
        count = 0
        for gated in list(_gated(graph)):
            why = _why_not(gated)
            if why:
                skipped.append(Skipped(module_path(gated.product) or gated.product.name, why))
                continue
            handle = f"gated_linear_{count}"
            register(graph_module, handle, Packed(gated.weight.target, transposed=False, gated=True), context)
            with graph.inserting_before(gated.product):
                node = graph.get_attr(handle)
            columns = value(gated.product).shape[-1]
            LinearCall(gated.x, node, gated.bias, columns, activation=int(gated.activation)).replace(gated.product)
            count += 1
        graph.eliminate_dead_code()
        drop_unused_tensors(graph_module)
        return PassReport(count, tuple(skipped))


@dataclass(frozen=True)
class _Gated:
    """product = activation(first half) * second half of the columns of a linear."""

    product: fx.Node
    activation: Activation
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def _gated(graph: fx.Graph) -> Iterator[_Gated]:
    for node in graph.nodes:
        if is_call(node, aten.mul) and len(node.args) == 2 and all(isinstance(arg, fx.Node) for arg in node.args):
            for activated, up in (node.args, node.args[::-1]):
                linear = _gated_linear(activated, up)
                if linear is not None:
                    bias = linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
                    yield _Gated(node, _activation(activated), linear.args[0], linear.args[1], bias)
                    break


def _activation(node: fx.Node) -> Activation:
    if is_call(node, aten.silu):
        return Activation.SILU
    if is_call(node, aten.gelu) and node.kwargs.get("approximate", (*node.args, "none")[1]) == "tanh":
        return Activation.GELU_TANH
    return Activation.NONE


def _gated_linear(activated: fx.Node, up: fx.Node) -> fx.Node | None:
    """The linear whose first half of columns was ``activated`` and whose second is ``up``, and of which nothing else is
    made."""
    gate = activated.args[0] if _activation(activated) is not Activation.NONE else None
    if not is_call(gate, operator.getitem) or not is_call(up, operator.getitem):
        return None
    parts = gate.args[0]
    if up.args[0] is not parts or (gate.args[1], up.args[1]) != (0, 1) or not _is_halved(parts):
        return None
    linear = parts.args[0]
    if not is_call(linear, aten.linear) or any(len(node.users) > 1 for node in (linear, gate, activated, up)):
        return None
    return linear


def _is_halved(parts: fx.Node) -> bool:
    """Whether these are the two halves of the columns of something."""
    if not is_call(parts, aten.split_with_sizes, aten.split, aten.chunk):
        return False
    dim = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
    sizes = [part.shape[-1] for part in value(parts)]
    return dim % rank(parts.args[0]) == rank(parts.args[0]) - 1 and len(sizes) == 2 and sizes[0] == sizes[1]


def _why_not(gated: _Gated) -> str | None:
    if gated.weight.op != "get_attr":
        return "its weight is computed"
    if len(gated.weight.users) > 1:
        return "its weight is used elsewhere too"
    if value(gated.weight).shape[0] % (2 * TURN):
        return f"its halves of {value(gated.product).shape[-1]} columns are no multiple of {TURN}"
    return why_not_ours(value(gated.x).dtype)


@register_fact("gates_fused")
def check_gates_fused(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No gates are left that could be fused with the linear that makes them."""
    for gated in _gated(graph_module.graph):
        require(_why_not(gated) is not None, f"the gates of {gated.product.name} are not fused")
