"""What every node of a graph computes, as fake values: computed anew where something changed, and once for what is
alike.

Shape functions of dynamic sizes cost more than everything else in a pipeline. A pass changes few nodes, so a node that
is what it was keeps its value. And the layers of a model do the same: calls that are alike share one fake value, so
that those of the next layer, which get it, are alike again. Values are therefore not to be told apart by identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_aggregate

from chunkc.passes.fx_tools import fake_mode_of, placeholders, symbol_of

#: where a node keeps what its value was computed from
_PROPAGATED = "chunkc_propagated"


def propagate(graph_module: fx.GraphModule) -> None:
    """Recompute ``meta["val"]`` of every node from the placeholders' fake values.

    Raises:
        RuntimeError (or what the op raises): shapes or dtypes do not fit each other.
    """
    mode = fake_mode_of(graph_module.graph)
    arguments = [node.meta["val"] for node in placeholders(graph_module.graph).values()]
    # without Python's dispatcher some meta kernels see symbolic sizes as unknown and fail
    with mode, enable_python_dispatcher(), torch.no_grad():
        _Propagator(graph_module, mode).run(*arguments, enable_io_processing=False)


class _Propagator(fx.Interpreter):
    """Runs the graph on fake tensors and notes every value."""

    def __init__(self, graph_module: fx.GraphModule, mode: FakeTensorMode) -> None:
        super().__init__(graph_module)
        self.mode = mode
        self.extra_traceback = False
        self._results: dict[Any, Any] = {}  # of calls, by what makes them alike
        self._tensors: dict[Any, FakeTensor] = {}  # by what makes them alike
        # fake values that are alike may stand for different numbers, and torch would take these for the same
        self._shares = not any(map(_asks_for_numbers, graph_module.graph.nodes))

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return n.meta["val"]
        if n.op == "output":
            return super().run_node(n)
        if n.op == "get_attr":  # its inputs are never remembered, or the node would keep the weight alive
            tensor = super().run_node(n)
            return self._keep(n, self._shared(tensor) if isinstance(tensor, torch.Tensor) else tensor, ())
        inputs = [self.env[other] for other in n.all_input_nodes]
        known = n.meta.get(_PROPAGATED)
        spelled = repr((n.args, n.kwargs))  # 1, 1.0 and True are equal, and make different dtypes
        if known is not None and known[:4] == (n.target, n.args, n.kwargs, spelled):
            if len(known[4]) == len(inputs) and all(a is b for a, b in zip(known[4], inputs, strict=True)):
                if isinstance(n.meta["val"], FakeTensor):
                    self._tensors.setdefault(_traits(n.meta["val"]), n.meta["val"])
                return n.meta["val"]
        call = (n.target, repr(map_aggregate((n.args, n.kwargs), self._by_identity)))
        if call not in self._results or not self._shares:
            result = super().run_node(n)
            self._results[call] = self._shared(result) if isinstance(result, FakeTensor) else result
        return self._keep(n, self._results[call], (n.target, n.args, n.kwargs, spelled, inputs))

    def _by_identity(self, argument: Any) -> Any:
        return _Value(id(self.env[argument])) if isinstance(argument, fx.Node) else argument

    def _shared(self, tensor: torch.Tensor) -> FakeTensor:
        """The fake value of all tensors like this one."""
        traits = _traits(tensor)
        if traits not in self._tensors or not self._shares:
            fake = isinstance(tensor, FakeTensor)
            self._tensors[traits] = tensor if fake else self.mode.from_tensor(tensor, static_shapes=True)
        return self._tensors[traits]

    def _keep(self, n: fx.Node, result: Any, source: tuple[Any, ...]) -> Any:
        """Note a value; one like the last is kept, so that what follows need not be computed again."""
        last = n.meta.get("val")
        tensors = isinstance(last, FakeTensor) and isinstance(result, FakeTensor)
        if _PROPAGATED not in n.meta or not tensors or _traits(last) != _traits(result):
            n.meta["val"] = result
        n.meta[_PROPAGATED] = source
        return n.meta["val"]


@dataclass(frozen=True)
class _Value:
    """Stands for a node's value among arguments. All values live while the graph runs: the number is one's alone."""

    number: int


def _traits(tensor: torch.Tensor) -> tuple[Any, ...]:
    """All that an operator's shape function looks at; sizes as expressions."""
    sizes = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    symbols = tuple(size if symbol_of(size) is None else symbol_of(size) for size in sizes)
    return (tensor.dtype, tensor.device.type, tensor.dim(), tensor.requires_grad, *symbols)


def _asks_for_numbers(node: fx.Node) -> bool:
    """Whether the result's size, or its value outside of tensors, depends on what a tensor holds."""
    tags = getattr(node.target, "tags", ())
    may = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    return may and ("val" not in node.meta or bool(free_unbacked_symbols(node.meta["val"])))
