"""Lets go of tensors that a rewritten graph no longer names."""

from __future__ import annotations

from torch import fx


def drop_unused_tensors(graph_module: fx.GraphModule) -> None:
    """Delete parameters, buffers and submodules that no node of the graph names; they are not copied anywhere."""
    graph_module.delete_all_unused_submodules()
    used = {node.target for node in graph_module.graph.nodes if node.op == "get_attr"}
    for path, module in list(graph_module.named_modules()):
        for table in (module._parameters, module._buffers):
            for name in list(table):
                if (f"{path}.{name}" if path else name) not in used:
                    del table[name]
