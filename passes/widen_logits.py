"""widen_logits: a half-precision model's logits are handed out as the head's product summed them, in float32.

The product is summed in float32 whatever the weights are. Rounding it to bfloat16 keeps eight bits: likely tokens,
whose logits lie close together, become equal, and greedy decoding takes the first of them instead of the best.

before::

    %logits = chunkc.packed_linear(%h, %packed_linear_120, None, 49152)               # [1, L, V] bfloat16
    return aten.view(%logits, [L, V])

after::

    %logits = chunkc.packed_linear(%h, %packed_linear_120, None, 49152, float32)      # [1, L, V] float32
    return aten.view(%logits, [L, V])

A factor or a softcap between product and logits is then computed in float32, too. Left alone, and said: logits that
something else computes or reads too, and heads that oneDNN multiplies, which rounds its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from chunkc.kernels.packed_linear import active_body
from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, is_call, module_path, output_node, value

#: what keeps the dtype of its first argument, and does to a number what it does in any precision
_KEEPS_DTYPE = (aten.view, aten.reshape, aten.squeeze, aten.select, aten.mul, aten.div, aten.tanh)


@dataclass(frozen=True)
class WidenLogits(GraphPass):
    """See the module's text. Ensures ``logits_wide``."""

    name = "widen_logits"
    requires = ("linears_packed",)
    ensures = ("logits_wide",)

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Never refuses."""
        logits = output_node(graph_module.graph)
        if value(logits).dtype is torch.float32:
            return PassReport(0)
        head = _head(logits)
        if head is None or not _is_summed_by_us(head):
            why = "that no packed linear alone makes" if head is None else "whose sums oneDNN rounds on this machine"
            what = module_path(head or logits) or logits.name
            return PassReport(0, (Skipped(what, f"logits of {value(logits).dtype} {why}"),))
        head.args = (*head.args[:4], torch.float32)
        return PassReport(1)


def _head(logits: fx.Node) -> fx.Node | None:
    """The packed linear whose product are the logits, where nothing else is made of it."""
    node = logits
    while len(node.users) == 1:
        if is_call(node, torch.ops.chunkc.packed_linear):
            return node
        operands = [other for other in node.all_input_nodes if isinstance(value(other), torch.Tensor)]
        if not is_call(node, *_KEEPS_DTYPE) or node.kwargs or operands != [node.args[0]]:
            return None
        node = operands[0]
    return None


def _is_summed_by_us(head: fx.Node) -> bool:
    return active_body(value(head.args[0]).dtype) == "own"


@register_fact("logits_wide")
def check_logits_wide(graph_module: fx.GraphModule, context: PassContext) -> None:
    """Logits that a packed linear of ours alone makes are float32."""
    logits = output_node(graph_module.graph)
    head = _head(logits)
    wide = value(logits).dtype is torch.float32 or head is None or not _is_summed_by_us(head)
    require(wide, f"the logits are {value(logits).dtype}")
