"""Runs the compiled graph on packed batches; owns the memory of the key/value pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from chunkc.errors import CapacityError
from chunkc.kernels.cpu_memory import prefer_huge_pages
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.deferred_logits import Logits, rows_of
from chunkc.runtime.machine import CORES, Machine

if TYPE_CHECKING:
    from chunkc.runtime.decode_graphs import DecodeGraphs


class Graph(Protocol):
    """The whole model, cut into parts; ``chunkc.program.LoweredGraph`` is one."""

    @property
    def num_parts(self) -> int:
        """How many parts there are, at least one."""

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> Logits:
        """Runs all parts. Takes the step's inputs by name (see ``passes.page_attention`` and
        ``passes.gather_logits``), writes pages in place, gives logits [L, V]."""

    def start(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """The state of a step in which no part has run."""

    def advance(self, state: list[torch.Tensor | None], begin: int, end: int) -> None:
        """Runs parts ``begin`` to ``end - 1``."""

    def logits(self, state: list[torch.Tensor | None]) -> Logits:
        """The logits, when all parts have run."""

    def weights_of(self, part: int) -> int:
        """How many numbers the weights of a part hold."""


class Forward(Protocol):
    """One batch on its way through the model, part by part (a part is about a layer).

    Attributes:
        num_parts: how many there are.
        next_part: how many have run.
    """

    num_parts: int
    next_part: int

    def advance(self) -> None:
        """Run the next part. Raises what the model raises; the batch is then lost."""

    def logits(self) -> Logits:
        """Logits [L, V] of ``batch.logits_rows``, once all parts have run."""


class ModelRunner(Protocol):
    """What an engine needs of a model.

    Attributes:
        vocab_size: token ids are below it.
        max_positions: longest sequence the model is defined for, in tokens.
        page_size: tokens per page.
        num_pages: pages in the key/value cache.
        num_parts: into how many parts a batch's way can be cut.
        machine: what it runs on.
    """

    vocab_size: int
    max_positions: int
    page_size: int
    num_pages: int
    num_parts: int
    machine: Machine

    def run(self, batch: PackedBatch) -> Logits:
        """Write the batch's keys and values to their pages; logits [L, V] of ``batch.logits_rows``."""

    def start(self, batch: PackedBatch) -> Forward:
        """The same part by part. Several may be under way at a time, also in several threads, if no token of one
        is in the context of another."""

    def row_costs(self, positions: np.ndarray) -> np.ndarray:
        """What tokens at these positions cost, float64 [n]; 1 is a token's cost outside of attention."""

    def with_pages(self, num_pages: int) -> ModelRunner:
        """The same model with a cache of its own. Raises ``CapacityError`` if that does not fit into memory."""


class GraphRunner:
    """A ``ModelRunner`` over one graph, compiled or not.

    Args:
        graph: the model.
        layers: the graph's attention calls, in order.
        vocab_size, max_positions, page_size, num_pages: see ``ModelRunner``.
        machine: what to run on; the graph's weights must lie there. No GPU has been seen yet by any of this.

    Attributes:
        layers, machine: as given.
        step_inputs: makes what the graph is given beside pages and weights.
        decode_graphs: replays whole decode steps, where something sets it.

    Raises:
        CapacityError: the pages do not fit into memory.
    """

    def __init__(
        self,
        graph: Graph,
        layers: Sequence[AttentionLayer],
        *,
        vocab_size: int,
        max_positions: int,
        page_size: int,
        num_pages: int,
        machine: Machine = CORES,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_parts = graph.num_parts
        self.machine = machine
        self._graph = graph
        self.layers = tuple(layers)
        #: floating point operations of a token outside of attention, in a median part
        self._linear_operations = _linear_operations(graph)
        self.step_inputs = machine.inputs(self.layers, page_size)
        self.decode_graphs: DecodeGraphs | None = None
        self._pages: dict[str, torch.Tensor] = {}
        try:
            for layer in layers:
                for kind, dim in (("k", layer.shape.qk_dim), ("v", layer.shape.v_dim)):
                    # not zeroed: no body reads what was not written, and untouched pages cost no memory
                    size = (num_pages, layer.shape.num_kv_heads, page_size, dim)
                    pages = self._pages[f"{kind}_pages_{layer.index}"] = torch.empty(
                        size, dtype=layer.dtype, device=machine.device
                    )
                    if machine.device.type == "cpu":
                        prefer_huge_pages(pages)
        except RuntimeError as error:
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens ({num_pages * bytes_per_page(layers, page_size)} "
                "bytes) cannot be allocated; give a smaller num_pages or cache_memory"
            ) from error

    def run(self, batch: PackedBatch) -> Logits:
        """One step. Raises what the graph raises; the pages of the batch's requests are then undefined."""
        with torch.no_grad():
            if self.decode_graphs is not None and (logits := self.decode_graphs.run(batch)) is not None:
                return logits
            return self._graph({**self._pages, **self.step_inputs(batch)})

    def compute(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Logits [L, V] of a step whose inputs, but for the pages, are given by name, on the device."""
        with torch.no_grad():
            return rows_of(self._graph({**self._pages, **inputs}))

    def start(self, batch: PackedBatch) -> Forward:
        """One step, to be advanced part by part."""
        state = self._graph.start({**self._pages, **self.step_inputs(batch)})
        return _GraphForward(self._graph, state, self.machine)

    def row_costs(self, positions: np.ndarray) -> np.ndarray:
        """As ``ModelRunner`` says, by counting floating point operations: 2 for every weight of a median part, and
        2 (Dk + Dv) for every query head and visible key of its attention."""
        flops = np.zeros(len(positions))
        for layer in self.layers:
            shape = layer.shape
            visible = positions + 1
            if shape.window:
                visible = np.minimum(visible, shape.window)
            if shape.chunk:
                visible = np.minimum(visible, positions % shape.chunk + 1)
            flops += 2 * (shape.qk_dim + shape.v_dim) * shape.num_kv_heads * shape.group * visible
        return 1 + flops / (max(len(self.layers), 1) * self._linear_operations)

    @property
    def linear_operations(self) -> float:
        """Floating point operations of a token outside of attention, in all parts."""
        return self._linear_operations * max(len(self.layers), 1)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of keys and values of a token, over all attention calls."""
        return bytes_per_page(self.layers, self.page_size) / self.page_size

    def with_pages(self, num_pages: int) -> GraphRunner:
        """See ``ModelRunner``."""
        return GraphRunner(
            self._graph,
            self.layers,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            page_size=self.page_size,
            num_pages=num_pages,
            machine=self.machine,
        )


class _GraphForward:
    """See ``Forward``."""

    def __init__(self, graph: Graph, state: list[torch.Tensor | None], machine: Machine) -> None:
        self.num_parts, self.next_part = graph.num_parts, 0
        self._graph, self._state, self._machine = graph, state, machine
        self._stream = machine.current

    def advance(self) -> None:
        if (stream := self._machine.current) != self._stream:
            self._machine.keep(value for value in self._state if value is not None)
            self._stream = stream
        with torch.no_grad():
            self._graph.advance(self._state, self.next_part, self.next_part + 1)
        self.next_part += 1

    def logits(self) -> Logits:
        return self._graph.logits(self._state)


def _linear_operations(graph: Graph) -> float:
    """Floating point operations of a token outside of attention, in a median part of the graph."""
    return 2 * max(1.0, statistics.median(graph.weights_of(part) for part in range(graph.num_parts)))


def bytes_per_page(layers: Sequence[AttentionLayer], page_size: int) -> int:
    """Bytes that one page takes over all attention calls, keys and values together."""
    return sum(
        layer.shape.num_kv_heads * page_size * (layer.shape.qk_dim + layer.shape.v_dim) * layer.dtype.itemsize
        for layer in layers
    )
