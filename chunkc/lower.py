"""Rewritten graph -> callable: Inductor, or plain PyTorch for debugging.

Weights become arguments of the compiled graph, so the artifact holds no copy of them and every dynamic size is an
argument's. There is one artifact for every number of tokens; it has no guards and cannot recompile.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc import compat
from chunkc.errors import PassError
from chunkc.passes.fx_tools import attribute, fake_mode_of, output_node, placeholders, value
from chunkc.passes.size_guards import failing_guards

MODES = ("compiled", "eager")


@dataclass
class CompileCounter:
    """Counts how often a graph was compiled in this process; serving must leave it alone."""

    graphs: int = 0


compile_counter = CompileCounter()


@dataclass(frozen=True)
class LoweredGraph:
    """A callable for the whole model.

    Attributes:
        function: takes all arguments in order, returns logits [L, V] (alone or in a sequence of one).
        input_names: names of the step's arguments, which come first.
        weights: the remaining arguments, fixed.
        resources: what must live as long as this does.
        seconds: time to lower.
    """

    function: Callable[..., Sequence[torch.Tensor] | torch.Tensor]
    input_names: tuple[str, ...]
    weights: tuple[torch.Tensor, ...]
    resources: tuple[Any, ...]
    seconds: float

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run one step. ``inputs``: every tensor of ``input_names``; pages are written in place."""
        result = self.function(*[inputs[name] for name in self.input_names], *self.weights)
        return result if isinstance(result, torch.Tensor) else result[0]


def lower(graph_module: fx.GraphModule, mode: str, resources: Sequence[Any] = ()) -> LoweredGraph:
    """Compile the graph.

    Args:
        graph_module: after all passes; every node has a fake value. It is changed: weights become inputs.
        mode: "compiled" (Inductor) or "eager" (op by op, for debugging).
        resources: what the passes want kept (``PassContext.resources``).

    Raises:
        ValueError: unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}; there are: {', '.join(MODES)}")
    start = time.perf_counter()
    names = tuple(placeholders(graph_module.graph))
    weights = _lift_weights(graph_module)
    function: Callable[..., Sequence[torch.Tensor] | torch.Tensor] = graph_module
    if mode == "compiled":
        examples = [value(node) for node in placeholders(graph_module.graph).values()]
        with compat.one_graph_for_every_size():
            function = _compile(graph_module, examples)
        compile_counter.graphs += 1
    return LoweredGraph(function, names, weights, tuple(resources), time.perf_counter() - start)


def _compile(graph_module: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Compile one graph with Inductor into one artifact; sizes stay as dynamic as the graph says they are.

    Raises:
        PassError: compilation assumed something of the sizes that the graph does not say.
    """
    from torch._inductor import config, standalone_compile

    # Inductor looks for the shape environment in this entry only. Without it, it makes a new one in which two
    # sizes that happen to have the same hint become one, and the artifact is silently wrong.
    result = output_node(graph_module.graph)
    result.meta["example_value"] = value(result)
    environment = fake_mode_of(graph_module.graph).shape_env
    # arguments come from us alone and are checked before they get here
    with torch.no_grad(), warnings.catch_warnings(), config.patch(size_asserts=False, nan_asserts=False):
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own internals
        artifact = standalone_compile(graph_module, examples, dynamic_shapes="from_graph")
    assumed = failing_guards(environment)
    if assumed:
        raise PassError(f"compiling the graph specialised its sizes: {'; '.join(assumed)}")
    return artifact


def _lift_weights(graph_module: fx.GraphModule) -> tuple[torch.Tensor, ...]:
    """Turn every ``get_attr`` into a graph input behind the others, and return the tensors in that order."""
    graph = graph_module.graph
    mode = fake_mode_of(graph)
    last = list(placeholders(graph).values())[-1]
    lifted: dict[str, fx.Node] = {}
    weights = []
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        if node.target not in lifted:
            tensor = attribute(graph_module, node.target).detach()
            with graph.inserting_after(last):
                last = graph.placeholder("weight_" + node.target.replace(".", "_"))
            last.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
            lifted[node.target] = last
            weights.append(tensor)
        node.replace_all_uses_with(lifted[node.target])
        graph.erase_node(node)
    _placeholders_first(graph)
    for module in graph_module.modules():
        module._parameters.clear()
        module._buffers.clear()
    graph_module.delete_all_unused_submodules()
    graph.lint()
    graph_module.recompile()
    return tuple(weights)


def _placeholders_first(graph: fx.Graph) -> None:
    """Inputs were inserted one behind the other; anything between them moves behind the last."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    first_other = next(node for node in graph.nodes if node.op != "placeholder")
    for node in inputs:
        first_other.prepend(node)
