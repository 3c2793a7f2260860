"""Makes an exported program functional: nothing in it is changed in place, and no call may or may not be an alias.

``ExportedProgram.run_decompositions({})`` does that for any program, by tracing it twice more, which takes longer than
the export. Most models hold nothing to be made functional but casts that may be the tensor itself; those are rewritten
here, and the rest of the graph is what the decomposition would leave.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from chunkc import compat
from chunkc.passes.fx_tools import aten, is_call, value

_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device)
_COMPOSITE = "CompositeImplicitAutograd"


def functional_module(program: ExportedProgram) -> fx.GraphModule:
    """The program as a plain GraphModule, functional.

    Args:
        program: as ``torch.export.export`` made it.
    """
    if not all(map(_is_simple, program.graph.nodes)):
        return compat.exported_module(program.run_decompositions({}))
    graph_module = compat.exported_module(program)
    for node in list(graph_module.graph.nodes):
        if is_call(node, *_CASTS):
            _spell_out(graph_module.graph, node)
        elif is_call(node, aten.dropout.default):
            node.replace_all_uses_with(node.args[0])
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def _is_simple(node: fx.Node) -> bool:
    """Whether the decomposition would leave the node, or ``functional_module`` knows what it would make of it."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is operator.getitem:
        return True
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        if schema.is_mutable:
            return False
        if is_call(node, *_CASTS):
            return _cast_of(node) is not None
        if is_call(node, aten.dropout.default):
            return node.args[2] is False
        if is_call(node, aten.reshape.default):
            return True
        aliases = any(result.alias_info is not None for result in schema.returns)
        return not (aliases and torch._C._dispatch_has_kernel_for_dispatch_key(node.target.name(), _COMPOSITE))
    return isinstance(value(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool))


def _cast_of(node: fx.Node) -> dict[str, Any] | None:
    """What a cast changes, as arguments of ``_to_copy``; nothing where it is the tensor itself; None if unknown."""
    source, result = value(node.args[0]), value(node)
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if given.get("copy") or given.get("memory_format") is not None:
        return None
    if (result.device, result.layout, result.stride()) != (source.device, source.layout, source.stride()):
        return None
    return {} if result.dtype == source.dtype else {"dtype": result.dtype}


def _spell_out(graph: fx.Graph, node: fx.Node) -> None:
    cast = _cast_of(node)
    new = node.args[0]
    if cast:
        with graph.inserting_before(node):
            new = graph.call_function(aten._to_copy.default, (node.args[0],), cast)
            new.meta = dict(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
