"""prove_token_parallel: outside attention, no op mixes tokens. An analysis; it changes nothing.

Chunked prefill runs each linear op once over the tokens of many requests. That is right only if what happens to one
token does not depend on which others are there. The analysis follows where the tokens are through every op of the
graph (``token_axis``, ``token_rules``, ``routing_rules``) and refuses an op that mixes them, or that it does not
know, by name.

before and after (what is proven is shown behind each line)::

    %x    = aten.embedding(%weight, %input_ids)        # tokens along dim 1 of [1, S, 64]
    %h    = aten.linear(%x, %w)                        # tokens along dim 1
    %q    = aten.permute(aten.reshape(%h, [1, S, 4, 16]), [0, 2, 1, 3])      # tokens along dim 2
    %c    = aten.conv1d(...)                           # refused: [op aten.conv1d.default in module ...]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.facts import register_fact
from chunkc.passes.fx_tools import output_node, placeholders, refuse, symbol_of, value
from chunkc.passes.routing_rules import register_late_operators
from chunkc.passes.size_arguments import is_size, sizes_as_numbers
from chunkc.passes.token_axis import UNIFORM, MixesTokens, Size, State, Tokens, check_axes
from chunkc.passes.token_rules import rule_for

#: graph inputs with one entry a token, or one per row with logits
PER_TOKEN_INPUTS = ("input_ids", "position_ids", "positions", "slot_mapping", "logits_rows")

_HINT = "Everything outside attention must treat each token by itself."


@dataclass(frozen=True)
class ProveTokenParallel(GraphPass):
    """See the module's text. Ensures ``token_parallel``."""

    name = "prove_token_parallel"
    requires = ("canonical", "attention_recognized")
    ensures = ("token_parallel",)
    expects_matches = True

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Raises UnsupportedModelError naming op and module where tokens mix or an op is not known."""
        states = analyse(graph_module)
        return PassReport(sum(isinstance(state, Tokens) for state in states.values()))


class _Analysis:
    """States of the nodes seen so far; what the rules ask."""

    def __init__(self, symbols: tuple[Any, ...]) -> None:
        self.symbols = symbols
        self.states: dict[fx.Node, State] = {}

    def state(self, argument: Any) -> State:
        return self.states[argument] if isinstance(argument, fx.Node) else UNIFORM


def analyse(graph_module: fx.GraphModule) -> dict[fx.Node, State]:
    """Where the tokens are in every value of the graph.

    Raises:
        UnsupportedModelError: an op mixes tokens or has no rule, or the logits are not one row a token.
    """
    register_late_operators()
    inputs = placeholders(graph_module.graph)
    per_token = {name: node for name, node in inputs.items() if name in PER_TOKEN_INPUTS}
    symbols = {name: symbol_of(value(node).shape[-1]) for name, node in per_token.items()}
    at = _Analysis(tuple({symbol: None for symbol in symbols.values() if symbol is not None}))
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            if node.target in per_token:
                at.states[node] = Tokens(value(node).dim() - 1, symbols[node.target])
            else:  # pages and batch metadata: only mixed_attention may look at them
                at.states[node] = Size()
        elif node.op == "get_attr":
            at.states[node] = UNIFORM
        elif node.op == "call_function":
            at.states[node] = _apply(node, at)
    result = output_node(graph_module.graph)
    state = at.states[result]
    last = list(symbols.values())[-1] if "logits_rows" in symbols else symbols["input_ids"]
    in_order = isinstance(state, Tokens) and state.order is None and state.outer == state.inner == 1
    if not in_order or state.symbol != last or state.axis != value(result).dim() - 2:
        raise refuse(result, "the model's output is not one row of logits a token", _HINT)
    return at.states


def _apply(node: fx.Node, at: _Analysis) -> State:
    # what takes no token and no size is uniform whatever it does
    inputs = node.all_input_nodes
    is_tensor = isinstance(value(node), torch.Tensor)
    static = is_tensor and all(symbol_of(size) is None for size in value(node).shape)
    if static and all(at.states[other] == UNIFORM for other in inputs):
        return UNIFORM
    if not isinstance(value(node), (torch.Tensor, tuple, list)):  # arithmetic on sizes, a number read from a tensor
        return Size() if is_size(node) else UNIFORM
    rule = rule_for(node.target)
    if rule is None:
        raise refuse(
            node,
            "an operator of which chunkc does not know whether it mixes tokens",
            "If it treats each token by itself, say so with chunkc.passes.token_rules.token_rule.",
        )
    try:
        if sizes_as_numbers(node):
            raise MixesTokens("a value is computed from the number of tokens in the batch")
        state = rule(node, at)
        check_axes(state, value(node), at.symbols)
        return state
    except MixesTokens as reason:
        raise refuse(node, f"not token parallel: {reason}", _HINT) from None


@register_fact("token_parallel")
def check_token_parallel(graph_module: fx.GraphModule, context: PassContext) -> None:
    """Runs the whole analysis again."""
    analyse(graph_module)
