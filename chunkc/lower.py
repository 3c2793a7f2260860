"""Rewritten graph -> callable: its parts, each compiled by Inductor once, or run op by op for debugging.

Weights are arguments of the compiled parts, so an artifact holds no copy of them, layers that are alike share one,
and every dynamic size is an argument's. There is one artifact a kind of part for every number of tokens; it has no
guards and cannot recompile.
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
from chunkc.parts import WEIGHT, Part, cut, name_of
from chunkc.passes.fx_tools import attribute, fake_mode_of, output_node, placeholders, value
from chunkc.passes.size_guards import failing_guards
from chunkc.structure import describe

MODES = ("compiled", "eager")


@dataclass
class CompileCounter:
    """Counts how often a graph was compiled in this process; serving must leave it alone."""

    graphs: int = 0


compile_counter = CompileCounter()

#: takes a part's inputs in order, returns its outputs
PartFunction = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _Step:
    """One part, ready to run on numbered places: where its inputs are, where outputs go, what is not needed after."""

    function: PartFunction
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


class LoweredGraph:
    """A callable for the whole model, or for any contiguous range of its parts.

    Attributes:
        input_names: names of a step's arguments.
        num_parts: how many parts there are: what layers share and the embedding, layers, the last of them and head.
        num_kinds: how many of them differ, that is, were compiled.
        resources: what must live as long as this does.
        seconds: time to lower.
    """

    def __init__(
        self,
        input_names: Sequence[str],
        parts: Sequence[tuple[PartFunction, Sequence[str], Sequence[str]]],
        weights: Mapping[str, torch.Tensor],
        result: str,
        resources: Sequence[Any] = (),
        seconds: float = 0.0,
    ) -> None:
        self.input_names = tuple(input_names)
        self.num_parts = len(parts)
        self.num_kinds = len({id(function) for function, _, _ in parts})
        self.resources = tuple(resources)
        self.seconds = seconds
        places = {name: i for i, name in enumerate(self.input_names)}
        self._at_start: list[torch.Tensor | None] = [None] * len(places)
        for name, tensor in weights.items():
            places[name] = len(places)
            self._at_start.append(tensor)
        for _, _, outputs in parts:
            for name in outputs:
                places[name] = len(places)
                self._at_start.append(None)
        last_use = {name: i for i, (_, inputs, outputs) in enumerate(parts) for name in (*inputs, *outputs)}
        last_use[result] = len(parts)
        self._steps = tuple(
            _Step(
                function,
                tuple(places[name] for name in inputs),
                tuple(places[name] for name in outputs),
                tuple(places[n] for n in (*inputs, *outputs) if last_use[n] == i and n not in weights),
            )
            for i, (function, inputs, outputs) in enumerate(parts)
        )
        self._result = places[result]

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run one step. ``inputs``: every tensor of ``input_names``; pages are written in place."""
        state = self.start(inputs)
        self.advance(state, 0, self.num_parts)
        return self.logits(state)

    def start(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """The state of a step in which no part has run yet."""
        state = self._at_start.copy()
        for place, name in enumerate(self.input_names):
            state[place] = inputs[name]
        return state

    def advance(self, state: list[torch.Tensor | None], begin: int, end: int) -> None:
        """Run parts ``begin`` to ``end - 1`` of a step; those before must have run."""
        for step in self._steps[begin:end]:
            outputs = step.function(*[state[place] for place in step.inputs])
            for place, output in zip(step.outputs, outputs, strict=True):
                state[place] = output
            for place in step.dead:
                state[place] = None

    def logits(self, state: list[torch.Tensor | None]) -> torch.Tensor:
        """The result [L, V] of a step of which all parts have run."""
        logits = state[self._result]
        assert logits is not None
        return logits


def lower(graph_module: fx.GraphModule, mode: str, resources: Sequence[Any] = ()) -> LoweredGraph:
    """Compile the graph.

    Args:
        graph_module: after all passes; every node has a fake value. Its weights are taken out of it.
        mode: "compiled" (Inductor) or "eager" (op by op, for debugging).
        resources: what the passes want kept (``PassContext.resources``).

    Raises:
        ValueError: unknown mode.
        PassError: compilation assumed something of the sizes that the graph does not say.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}; there are: {', '.join(MODES)}")
    start = time.perf_counter()
    parts = cut(graph_module)
    names = [name for part in parts for name in part.inputs if name.startswith(WEIGHT)]
    weights = {name: attribute(graph_module, name.removeprefix(WEIGHT)).detach() for name in names}
    functions: list[PartFunction] = [part.graph_module for part in parts]
    if mode == "compiled":
        functions = _compile_each_kind_once(parts)
    lowered = LoweredGraph(
        list(placeholders(graph_module.graph)),
        [(function, part.inputs, part.outputs) for function, part in zip(functions, parts, strict=True)],
        weights,
        name_of(output_node(graph_module.graph)),
        resources,
    )
    _forget_weights(graph_module)
    lowered.seconds = time.perf_counter() - start
    return lowered


def _compile_each_kind_once(parts: Sequence[Part]) -> list[PartFunction]:
    # all before the first compilation, which narrows what the shape environment says of sizes
    texts = [describe(part.graph_module.graph) for part in parts]
    compiled: dict[str, PartFunction] = {}
    functions = []
    for part, text in zip(parts, texts, strict=True):
        if text not in compiled:
            with compat.one_graph_for_every_size():
                compiled[text] = _compile(part.graph_module)
            compile_counter.graphs += 1
        functions.append(compiled[text])
    return functions


def _compile(graph_module: fx.GraphModule) -> PartFunction:
    """Compile one graph with Inductor into one artifact; sizes stay as dynamic as the graph says they are."""
    from torch._inductor import config, standalone_compile

    # Inductor looks for the shape environment in this entry only. Without it, it makes a new one in which two
    # sizes that happen to have the same hint become one, and the artifact is silently wrong.
    result = graph_module.graph.output_node().args[0][0]
    result.meta["example_value"] = value(result)
    environment = fake_mode_of(graph_module.graph).shape_env
    examples = [value(node) for node in placeholders(graph_module.graph).values()]
    # arguments come from us alone and are checked before they get here
    with torch.no_grad(), warnings.catch_warnings(), config.patch(size_asserts=False, nan_asserts=False):
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own internals
        artifact = standalone_compile(graph_module, examples, dynamic_shapes="from_graph")
    assumed = failing_guards(environment)
    if assumed:
        raise PassError(f"compiling the graph specialised its sizes: {'; '.join(assumed)}")
    return artifact


def _forget_weights(graph_module: fx.GraphModule) -> None:
    """Let go of the tensors, which the lowered graph holds now where it needs them."""
    for module in graph_module.modules():
        module._parameters.clear()
        module._buffers.clear()
