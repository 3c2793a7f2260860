"""widen_logits: a half-precision model's logits are handed out as the head's product summed them, in float32.

The product is summed in float32 whatever the weights are. Rounding it to bfloat16 keeps eight bits: likely tokens,
whose logits lie close together, become equal, and greedy decoding takes the first of them instead of the best.

before::

    %logits = chunkc.packed_linear(%h, %packed_linear_120, None, 49152)               # [1, L, V] bfloat16
    return aten.view(%logits, [L, V])

after::

    %logits = chunkc.packed_linear(%h, %packed_linear_120, None, 49152, float32)      # [1, L, V] float32
    return aten.view(%logits, [L, V])

A factor or a softcap between product and logits is then computed in float32, too. Left alone: logits that something
else computes, that something else reads too, or that are float32 anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

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
        if head is None:
            why = f"logits of {value(logits).dtype} that no packed linear alone makes"
            return PassReport(0, (Skipped(module_path(logits) or logits.name, why),))
        head.args = (*head.args[:4], torch.float32)
        return PassReport(1)


def _head(logits: fx.Node) -> fx.Node | None:
    """The packed linear whose product are the logits, where nothing else is made of it."""
    node = logits
    while len(node.users) == 1:
        if is_call(node, torch.ops.chunkc.packed_linear):
            return node
        operands = [other for other in node.all_input_nodes if isinstance(value(other), torch.Tensor)]
        if not is_call(node, *_KEEPS_DTYPE) or operands != [node.args[0]]:
            return None
        node = operands[0]
    return None


@register_fact("logits_wide")
def check_logits_wide(graph_module: fx.GraphModule, context: PassContext) -> None:
    """Logits that a packed linear alone makes are float32."""
    logits = output_node(graph_module.graph)
    require(value(logits).dtype is torch.float32 or _head(logits) is None, f"the logits are {value(logits).dtype}")
