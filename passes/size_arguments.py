"""Sizes may make shapes, and nothing else.

How many tokens there are is a property of the batch, not of a request. An operator that takes it as a number (to
divide by it, to compare with it, to start a slice at it) computes something that changes with who else is there.
"""

from __future__ import annotations

import torch
from torch import fx

from chunkc.passes.fx_tools import aten, value

#: the arguments of an operator that are shapes, or the end of a range; by overload packet, else by overload
_SHAPES = {
    aten.reshape: (1,),
    aten.view: (1,),
    aten._unsafe_view: (1,),
    aten.expand: (1,),
    aten.repeat: (1,),
    aten.full: (0,),
    aten.zeros: (0,),
    aten.ones: (0,),
    aten.empty: (0,),
    aten.eye: (0, 1),
    aten.new_full: (1,),
    aten.new_zeros: (1,),
    aten.new_ones: (1,),
    aten.new_empty: (1,),
    aten.arange.default: (0,),
    aten.arange.start: (1,),
    aten.arange.start_step: (1,),
    aten.slice: (3,),
}
#: keyword arguments that are shapes
_SHAPE_KEYWORDS = ("size", "output_size")


def is_size(node: fx.Node) -> bool:
    """Whether a node computes a dynamic number, not a tensor."""
    return isinstance(value(node), (torch.SymInt, torch.SymFloat, torch.SymBool))


def sizes_as_numbers(node: fx.Node) -> list[fx.Node]:
    """The sizes that a call on tensors takes otherwise than as a shape. Arithmetic on sizes alone has none."""
    if node.op != "call_function" or not isinstance(value(node), (torch.Tensor, tuple, list)):
        return []
    shapes = _SHAPES.get(node.target) or _SHAPES.get(getattr(node.target, "overloadpacket", None)) or ()
    arguments = [argument for index, argument in enumerate(node.args) if index not in shapes]
    keywords = [argument for name, argument in node.kwargs.items() if name not in _SHAPE_KEYWORDS]
    found: list[fx.Node] = []
    fx.node.map_arg((arguments, keywords), found.append)
    return [other for other in found if is_size(other)]
