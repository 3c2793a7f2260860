"""A prepared model with its compiled functions and what its weights are made of: to be put together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from chunkc import memory
from chunkc.graph_library import GraphFunction
from chunkc.passes.attributes import set_attribute
from chunkc.passes.made_tensors import Made, make, make_all
from chunkc.prepared import Prepared, originals_of
from chunkc.program import LoweredGraph

if TYPE_CHECKING:
    from torch import fx

#: bytes that may lie about freed, in the C library's hands, while weights are made
_TRIM_AFTER = 16 * 2**20


@dataclass(frozen=True)
class Preparation:
    """A prepared model.

    Attributes:
        prepared: what is known of it.
        functions: gives them, one a kind of part, once. They may be with the compiler until then.
        source: where it comes from, in words.
        seconds: time it took.
        originals: what its weights are made of, by name, until ``lowered`` makes them.
        made: how; nothing where passes made the tensors themselves.
        resources: what must live as long as the graph may run.
        before_lowering: the graph before compilation, where there is one, to find a faulty module.
        constants: see ``prepared.store``; None where it is not to be kept.
    """

    prepared: Prepared
    functions: Callable[[], Sequence[GraphFunction]]
    source: str
    seconds: float
    originals: dict[str, torch.Tensor]
    made: Mapping[str, Made]
    resources: list[Any] = field(default_factory=list)
    before_lowering: fx.GraphModule | None = None
    constants: dict[str, torch.Tensor] | None = None

    def lowered(self, *, owned: bool = False) -> LoweredGraph:
        """The callable, once: the tensors that its weights are made of are let go of, one after the other.

        Args:
            owned: nobody else holds any of them.
        """
        freed = 0

        def released(size: int) -> None:
            nonlocal freed
            freed += size
            if freed > _TRIM_AFTER:
                freed = 0
                memory.trim()

        names = self.prepared.program.weights
        held = self.constants or ()  # to be kept on disk
        weights = make_all(names, self.made, self.originals, self.resources, owned=owned, held=held, released=released)
        memory.trim()
        return LoweredGraph(self.prepared.program, self.functions(), weights, self.resources)

    def runnable(self, model: nn.Module) -> fx.GraphModule | None:
        """The graph before compilation, where there is one, over the weights of a model like the one prepared."""
        graph_module = self.before_lowering
        if graph_module is None or not self.made:
            return graph_module
        originals = originals_of(self.prepared.program, self.made, model, self.constants or {})
        for node in graph_module.graph.find_nodes(op="get_attr"):
            set_attribute(
                graph_module, node.target, make(node.target, self.made, originals.__getitem__, self.resources)
            )
        return graph_module
