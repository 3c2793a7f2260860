"""A model prepared to run op by op on another device than the CPU, as a graph that lies there.

``chunkc.compile`` does not do this yet. None of it has run on a GPU.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import fx, nn

from chunkc import preparation
from chunkc.errors import UnsupportedModelError
from chunkc.graph_library import GraphFunction
from chunkc.passes.core import core_passes
from chunkc.passes.fuse_gates import FuseGates
from chunkc.passes.fuse_norms import FuseNorms
from chunkc.passes.fuse_residuals import FuseResiduals
from chunkc.passes.fuse_rotary import FuseRotary
from chunkc.passes.pack_linears import PackLinears
from chunkc.passes.pipeline import PassPipeline
from chunkc.passes.split_layers import SplitLayers
from chunkc.passes.widen_logits import WidenLogits
from chunkc.prepared import Prepared
from chunkc.program import LoweredGraph

#: passes that pack linears for the CPU, and those that go by that or by the CPU's body of the attention
_FOR_CPU = (FuseRotary, FuseGates, PackLinears, WidenLogits, FuseNorms, FuseResiduals)


@dataclass(frozen=True)
class _SplitPlain(SplitLayers):
    """The same where linears stay as they are."""

    requires = ("linears_fused", "logits_gathered")


@dataclass(frozen=True)
class Ready:
    """A prepared model and its graph, on the CPU."""

    prepared: Prepared
    graph: LoweredGraph


def prepare(model: nn.Module) -> Ready:
    """The model after all passes but those that are for the CPU; op by op, still on the CPU.

    Raises:
        UnsupportedModelError: see ``chunkc.rewrite``.
    """
    passes = [each for each in core_passes() if not isinstance(each, (*_FOR_CPU, SplitLayers))]
    pipeline = PassPipeline([*passes, _SplitPlain()])
    work = preparation.from_scratch(model, passes=pipeline, dump=None, mode="eager")
    return Ready(work.prepared, work.lowered())


def move(graph: LoweredGraph, device: torch.device) -> LoweredGraph:
    """The graph with its weights on the device, and all that it makes there too. The given one is not changed.

    Raises:
        UnsupportedModelError: its parts are compiled for the CPU, or its weights are packed for it.
    """
    if graph.resources:
        raise UnsupportedModelError("the graph's linears are packed for the CPU", hint="Leave pack_linears out.")
    functions = [_moved(function, device) for function in graph.functions]
    weights = {name: weight.to(device) for name, weight in graph.weights.items()}
    return LoweredGraph(graph.program, functions, weights)


def _moved(function: GraphFunction, device: torch.device) -> GraphFunction:
    """A part whose tensors are made on the device: what names one names it."""
    if not isinstance(function, fx.GraphModule):
        raise UnsupportedModelError("the graph's parts are compiled for the CPU", hint="Prepare it in mode 'eager'.")
    graph = copy.deepcopy(function.graph)
    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda value: _placed(value, device))
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda value: _placed(value, device))
        schema = getattr(node.target, "_schema", None)
        names = () if schema is None else {argument.name for argument in schema.arguments}
        makes = not any(map(_is_tensor, node.all_input_nodes))
        if "device" in names and makes and node.kwargs.get("device") is None:
            node.kwargs = {**node.kwargs, "device": device}
    return fx.GraphModule(function, graph)


def _placed(value: object, device: torch.device) -> object:
    return device if isinstance(value, torch.device) else value


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
