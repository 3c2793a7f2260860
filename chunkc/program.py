"""The lowered model: parts in a row, each a function of what came before, its weights and the step's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from chunkc.graph_library import GraphFunction
from chunkc.kernels.linear_argmax import linear_rows
from chunkc.kernels.packed_linear import PackedWeight
from chunkc.runtime.deferred_logits import DeferredLogits, Logits

#: before the names of weights among the inputs of parts
WEIGHT = "weight:"


@dataclass(frozen=True)
class PartCall:
    """One part.

    Attributes:
        kind: number of its function; parts that are alike share one.
        inputs, outputs: see ``chunkc.parts.Part``.
    """

    kind: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Head:
    """The product that makes logits of what the parts give; see ``chunkc.head``.

    Attributes:
        handle, bias, norm_weight: names, or None for none.
        out_features: V.
        norm_eps: of the norm before the product, where it has a weight.
    """

    handle: str
    bias: str | None
    out_features: int
    norm_weight: str | None
    norm_eps: float

    @property
    def weights(self) -> list[str]:
        """Names of its weights."""
        return [name for name in (self.handle, self.bias, self.norm_weight) if name is not None]


@dataclass(frozen=True)
class Program:
    """What is computed, but for functions and weights.

    Attributes:
        inputs: names of a step's arguments.
        parts: in the order in which they run.
        result: name of the logits, or of what the head multiplies: [..., K], a row for each of the logits.
        head: None where parts make the logits.
    """

    inputs: tuple[str, ...]
    parts: tuple[PartCall, ...]
    result: str
    head: Head | None = None

    @property
    def num_kinds(self) -> int:
        """How many parts differ, that is, how many functions there are."""
        return len({part.kind for part in self.parts})

    @property
    def weights(self) -> list[str]:
        """Names, without the mark, of the tensors that are fixed."""
        names = [name for part in self.parts for name in part.inputs if name.startswith(WEIGHT)]
        names += self.head.weights if self.head is not None else []
        return [name.removeprefix(WEIGHT) for name in dict.fromkeys(names)]


@dataclass(frozen=True)
class _Step:
    """One part on numbered places: where its inputs are, where outputs go, what is not needed after."""

    function: GraphFunction
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    dead: tuple[int, ...]


#: the values of a step so far, by place
State = list[torch.Tensor | None]


class LoweredGraph:
    """A callable for the whole model, or for any contiguous range of its parts.

    Args:
        program: what to run.
        functions: one a kind.
        weights: by name.
        resources: what must live as long as this does.

    Attributes:
        program, functions, weights, resources: as given.
    """

    def __init__(
        self,
        program: Program,
        functions: Sequence[GraphFunction],
        weights: Mapping[str, torch.Tensor],
        resources: Sequence[Any] = (),
    ) -> None:
        self.program = program
        self.functions, self.weights = tuple(functions), dict(weights)
        self.resources = tuple(resources)
        places = {name: i for i, name in enumerate(program.inputs)}
        self._at_start: State = [None] * len(places)
        for name in program.weights:
            places[WEIGHT + name] = len(places)
            self._at_start.append(weights[name])
        for part in program.parts:
            for name in part.outputs:
                places[name] = len(places)
                self._at_start.append(None)
        last_use = {name: i for i, part in enumerate(program.parts) for name in (*part.inputs, *part.outputs)}
        last_use[program.result] = len(program.parts)
        self._steps = tuple(
            _Step(
                functions[part.kind],
                tuple(places[name] for name in part.inputs),
                tuple(places[name] for name in part.outputs),
                tuple(
                    places[name]
                    for name in (*part.inputs, *part.outputs)
                    if last_use[name] == i and not name.startswith(WEIGHT)
                ),
            )
            for i, part in enumerate(program.parts)
        )
        self._result = places[program.result]
        packed = {each.handle.data_ptr(): each.numel for each in resources if isinstance(each, PackedWeight)}
        self._weight_sizes = {name: packed.get(w.data_ptr(), w.numel()) for name, w in weights.items()}

    @property
    def num_parts(self) -> int:
        """What layers share and the embedding, then layers, then the last of them with the head."""
        return len(self._steps)

    def weights_of(self, part: int) -> int:
        """How many numbers the weights of a part hold, those behind handles included."""
        names = self.program.parts[part].inputs
        return sum(self._weight_sizes[name.removeprefix(WEIGHT)] for name in names if name.startswith(WEIGHT))

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Logits:
        """Run one step. ``inputs``: every tensor of ``program.inputs``; pages are written in place."""
        state = self.start(inputs)
        self.advance(state, 0, self.num_parts)
        return self.logits(state)

    def start(self, inputs: Mapping[str, torch.Tensor]) -> State:
        """The state of a step in which no part has run yet."""
        state = self._at_start.copy()
        for place, name in enumerate(self.program.inputs):
            state[place] = inputs[name]
        return state

    def advance(self, state: State, begin: int, end: int) -> None:
        """Run parts ``begin`` to ``end - 1`` of a step; those before must have run."""
        for step in self._steps[begin:end]:
            outputs = step.function(*[state[place] for place in step.inputs])
            for place, output in zip(step.outputs, outputs, strict=True):
                state[place] = output
            for place in step.dead:
                state[place] = None

    def logits(self, state: State) -> Logits:
        """The result, [L, V], of a step of which all parts have run."""
        result, head = state[self._result], self.program.head
        assert result is not None
        if head is None:
            return result
        handle, bias, norm_weight = (
            None if name is None else self.weights[name.removeprefix(WEIGHT)]
            for name in (head.handle, head.bias, head.norm_weight)
        )
        rows = result.reshape(-1, result.shape[-1])
        operands = (rows, handle, bias, head.out_features, norm_weight, head.norm_eps)
        return DeferredLogits(
            len(rows), partial(linear_rows, *operands), partial(torch.ops.chunkc.linear_argmax, *operands)
        )


def forget_weights(graph_module: nn.Module) -> None:
    """Let go of a module's tensors; who needs one holds it."""
    for module in graph_module.modules():
        module._parameters.clear()
        module._buffers.clear()
