"""The LM head's product, taken out of the graph: what is computed of it is known only when its step has run.

before::

    %logits = chunkc.packed_linear(%h, %packed_linear_120, None, 49152, float32)      # [1, L, V]
    return aten.view(%logits, [L, V])

after::

    return %h                                                                         # [1, L, K]

Taken are packed linears of ours, with the norm before them or without, whose float32 sums are the logits. Others stay
where they are.
"""

from __future__ import annotations

import torch
from torch import fx

from chunkc.kernels.fused_linear import Activation
from chunkc.parts import name_of
from chunkc.passes.fx_tools import aten, is_call, output_node, value
from chunkc.passes.linear_calls import FUSED, PACKED, LinearCall, why_not_ours
from chunkc.program import Head

#: what gives the same numbers in the same order
_VIEWS = (aten.view, aten.reshape, aten.squeeze, aten.unsqueeze)


def take_head(graph_module: fx.GraphModule) -> Head | None:
    """Take the head's product out of a graph whose result are logits. The graph then gives what is multiplied.

    Returns:
        the product; None, and the graph as it was, where it ends otherwise.
    """
    graph = graph_module.graph
    node = output_node(graph)
    while is_call(node, *_VIEWS) and len(node.users) == 1:
        node = node.args[0]
    call = _product(node)
    if call is None:
        return None
    operands = (call.handle, call.bias, call.norm_weight)
    if any(other is not None and other.op != "get_attr" for other in operands) or call.x.op != "call_function":
        return None
    graph.output_node().args = (call.x,)
    handle, bias, norm_weight = (None if other is None else name_of(other) for other in operands)
    graph.eliminate_dead_code()
    assert handle is not None
    return Head(handle, bias, call.out_features, norm_weight, call.norm_eps)


def _product(node: fx.Node) -> LinearCall | None:
    """The operands, where a node is a product of ours with float32 sums, nothing behind it, and one user."""
    if not is_call(node, PACKED, FUSED) or len(node.users) != 1 or value(node).dtype is not torch.float32:
        return None
    call = LinearCall(*(node.args[:4] if is_call(node, PACKED) else node.args))
    if call.activation != Activation.NONE or call.residual is not None:
        return None
    return call if why_not_ours(value(call.x).dtype) is None else None
