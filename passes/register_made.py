"""A pass makes a tensor: real, or fake where the real one is made when the passes are done (``made_tensors``)."""

from __future__ import annotations

import torch
from torch import fx, nn

from chunkc.passes.attributes import attribute
from chunkc.passes.base import PassContext
from chunkc.passes.fx_tools import fake_mode_of
from chunkc.passes.made_tensors import Made, Packed, ingredients, make


def register(graph_module: fx.GraphModule, name: str, how: Made, context: PassContext) -> None:
    """Give the graph a tensor, real or (where ``context.deferred``) fake, and note how it is made.

    Args:
        name: of the new attribute.
        how: made of attributes that the graph has.
    """
    context.made[name] = how
    if not context.deferred:
        tensor = make(name, {name: how}, lambda part: attribute(graph_module, part), context.resources)
    else:
        mode = fake_mode_of(graph_module.graph)
        for part in ingredients(name, {name: how}):
            if part not in context.made:
                context.ingredients[part] = attribute(graph_module, part).detach()

        def fake(part: str) -> torch.Tensor:
            found = attribute(graph_module, part)
            return found if part in context.made else mode.from_tensor(found.detach(), static_shapes=True)

        with mode:
            tensor = torch.empty(1, dtype=torch.int64) if isinstance(how, Packed) else make(name, {name: how}, fake, [])
    if isinstance(how, Packed):
        graph_module.register_buffer(name, tensor)
    else:
        graph_module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
