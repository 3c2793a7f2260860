"""Write a graph pass of your own, and see what it did to the graph.

A pass is a frozen dataclass with a name, the facts it requires, and `run`, which rewrites the graph in place.
The pipeline orders it, checks the graph after it, and compiles the result; and before the engine is handed
out, its logits are compared with the untouched model's, so a pass that changes the meaning is found out.

    python examples/custom_pass.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

import chunkc
from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.registry import register_pass

aten = torch.ops.aten


@register_pass
@dataclass(frozen=True)
class SpellOutSilu(GraphPass):
    """silu(x) -> x * sigmoid(x): the same in other words. A real pass would put a faster op here."""

    name = "spell_out_silu"
    requires = ("canonical",)
    before = ("fuse_gates",)  # which leaves no silu; without it, passes of yours come last
    expects_matches = True  # finding nothing is an error, not a pass that is on and does nothing

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        graph = graph_module.graph
        matches = graph.find_nodes(op="call_function", target=aten.silu.default)
        for node in matches:
            x = node.args[0]
            with graph.inserting_before(node):
                gate = graph.call_function(aten.sigmoid.default, (x,))
                product = graph.call_function(aten.mul.Tensor, (x, gate))
            node.replace_all_uses_with(product)
            graph.erase_node(node)
        return PassReport(matches=len(matches))


def main() -> None:
    # mode="eager" runs the graph without compiling it: quicker to start while you work on a pass.
    engine = chunkc.compile("SmolLM2-135M-Instruct", passes=["spell_out_silu"], mode="eager")
    print(engine.explain())
    (completion,) = engine.generate("The capital of France is", chunkc.SamplingParams(max_new_tokens=6))
    print(completion.text)


if __name__ == "__main__":
    main()
