"""gather_logits: what comes after the last attention runs only on the rows whose logits are wanted.

A prefill chunk of 512 tokens wants logits for one row or none. Everything downstream of the last attention treats
rows one by one (proven), so the rows are gathered right behind it: the last layer's MLP, the final norm and the
LM head all see L rows instead of T.

before::

    %att    = aten.unsqueeze(%mixed_29, 0)             # [1, T, 9, 64]
    %o      = aten.linear(aten.reshape(%att, [1, T, 576]), %wo)
    %h      = aten.add(%residual, %o)
    ...
    return %logits                                     # [T, V]

after::

    %att_l  = aten.index_select(%att, 1, %logits_rows)            # [1, L, 9, 64]
    %res_l  = aten.index_select(%residual, 1, %logits_rows)
    %o      = aten.linear(aten.reshape(%att_l, [1, L, 576]), %wo)
    ...
    return %logits                                     # [L, V]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import (
    add_placeholder,
    aten,
    call,
    is_call,
    new_size,
    output_node,
    placeholders,
    refuse,
    symbol_of,
    value,
)
from chunkc.passes.propagate import propagate
from chunkc.passes.prove_token_parallel import analyse
from chunkc.passes.token_axis import Size, Tokens, Uniform


@dataclass(frozen=True)
class GatherLogits(GraphPass):
    """See the module's text. Ensures ``logits_gathered``."""

    name = "gather_logits"
    requires = ("paged", "token_parallel", "linears_fused")
    ensures = ("logits_gathered",)
    expects_matches = True

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Raises UnsupportedModelError where a value behind the last attention cannot be gathered."""
        graph = graph_module.graph
        propagate(graph_module)
        states = analyse(graph_module)
        attentions = [node for node in graph.nodes if is_call(node, torch.ops.chunkc.mixed_attention)]
        if not attentions:
            return PassReport(0)
        region = _descendants(attentions[-1])
        rows = add_placeholder(graph, "logits_rows", (new_size(graph, "logits_rows", 24),), torch.int64)
        gathered: dict[fx.Node, fx.Node] = {}
        sizes: dict[fx.Node, fx.Node] = {}
        for node in [n for n in graph.nodes if n in region]:
            for source in node.all_input_nodes:
                if source in region:
                    continue
                state = states[source]
                if isinstance(state, Size) or _made_of_sizes(source):
                    new = sizes.setdefault(source, _resize(graph, source, rows, sizes))
                elif isinstance(state, Tokens):
                    new = gathered.get(source) or _gather(graph, source, state, rows, node)
                    gathered[source] = new
                elif isinstance(state, Uniform):
                    continue
                else:
                    raise refuse(source, "routing that starts before the last attention and ends after it")
                node.replace_input_with(source, new)
        graph.eliminate_dead_code()
        return PassReport(len(gathered), notes=(f"{len(region)} nodes run on the rows with logits only",))


def _made_of_sizes(node: fx.Node) -> bool:
    """Whether a value depends on the number of tokens and on nothing else of the batch (``arange(T)``)."""
    if node.op != "call_function":
        return False
    if is_call(node, aten.sym_size):
        return True
    return bool(node.all_input_nodes) and all(
        _made_of_sizes(other) or other.op == "get_attr" for other in node.all_input_nodes
    )


def _descendants(node: fx.Node) -> set[fx.Node]:
    """All nodes computed from ``node``, without the graph's output."""
    seen: set[fx.Node] = set()
    waiting = list(node.users)
    while waiting:
        current = waiting.pop()
        if current not in seen and current.op != "output":
            seen.add(current)
            waiting.extend(current.users)
    return seen


def _gather(graph: fx.Graph, source: fx.Node, state: Tokens, rows: fx.Node, user: fx.Node) -> fx.Node:
    """The wanted rows of ``source``, taken as late as can be so that the layer that made it stays like others."""
    if state.outer != 1 or state.inner != 1 or state.order is not None:
        raise refuse(source, "a value behind the last attention whose rows are not one a token")
    with graph.inserting_before(user):
        return call(graph, aten.index_select.default, source, state.axis, rows, like=source)


def _resize(graph: fx.Graph, source: fx.Node, rows: fx.Node, sizes: dict[fx.Node, fx.Node]) -> fx.Node:
    """``source``, a size or a constant made of the number of tokens, made of the number of gathered rows."""
    if source in sizes:
        return sizes[source]
    if source.op == "placeholder":
        raise refuse(source, "batch metadata is used outside attention")
    if source.op == "get_attr":
        return source
    with graph.inserting_after(source):
        if is_call(source, aten.sym_size):
            if symbol_of(value(source)) != symbol_of(value(placeholders(graph)["input_ids"]).shape[0]):
                raise refuse(source, "a size behind the last attention that is not the number of tokens")
            new = call(graph, aten.sym_size.int, rows, 0, like=source)
        else:
            new = graph.node_copy(source, lambda n: _resize(graph, n, rows, sizes))
    sizes[source] = new
    return new


@register_fact("logits_gathered")
def check_logits_gathered(graph_module: fx.GraphModule, context: PassContext) -> None:
    """The logits have as many rows as ``logits_rows`` has entries."""
    inputs = placeholders(graph_module.graph)
    require("logits_rows" in inputs, "the graph has no input logits_rows")
    wanted = symbol_of(value(inputs["logits_rows"]).shape[0])
    logits = value(output_node(graph_module.graph))
    require(logits.dim() == 2 and symbol_of(logits.shape[0]) == wanted, f"the logits have shape {tuple(logits.shape)}")
