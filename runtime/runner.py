"""Runs the compiled graph on packed batches; owns the memory of the key/value pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from chunkc.errors import CapacityError
from chunkc.kernels.cpu_memory import prefer_huge_pages
from chunkc.kernels.device import cpu
from chunkc.kernels.tasks import plan_tasks
from chunkc.passes.page_attention import AttentionLayer
from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.machine import CORES, Machine


class Graph(Protocol):
    """The whole model, cut into parts; ``chunkc.program.LoweredGraph`` is one."""

    @property
    def num_parts(self) -> int:
        """How many parts there are, at least one."""

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Runs all parts. Takes the step's inputs by name (see ``passes.page_attention`` and
        ``passes.gather_logits``), writes pages in place, gives logits [L, V]."""

    def start(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """The state of a step in which no part has run."""

    def advance(self, state: Any, begin: int, end: int) -> None:
        """Runs parts ``begin`` to ``end - 1``."""

    def logits(self, state: Any) -> torch.Tensor:
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

    def logits(self) -> torch.Tensor:
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

    def run(self, batch: PackedBatch) -> torch.Tensor:
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
    ) -> None:
        self.vocab_size = vocab_size
        self.max_positions = max_positions
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_parts = graph.num_parts
        self.machine: Machine = CORES
        self._graph = graph
        self._layers = tuple(layers)
        #: floating point operations of a token outside of attention, in a median part
        self._linear_operations = _linear_operations(graph)
        self._plans: dict[int, AttentionLayer] = {layer.plan: layer for layer in layers}
        self._pages: dict[str, torch.Tensor] = {}
        try:
            for layer in layers:
                for kind, dim in (("k", layer.shape.qk_dim), ("v", layer.shape.v_dim)):
                    # not zeroed: no body reads what was not written, and untouched pages cost no memory
                    size = (num_pages, layer.shape.num_kv_heads, page_size, dim)
                    pages = self._pages[f"{kind}_pages_{layer.index}"] = torch.empty(size, dtype=layer.dtype)
                    prefer_huge_pages(pages)
        except RuntimeError as error:
            raise CapacityError(
                f"a cache of {num_pages} pages of {page_size} tokens ({num_pages * bytes_per_page(layers, page_size)} "
                "bytes) cannot be allocated; give a smaller num_pages or cache_memory"
            ) from error

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """One step. Raises what the graph raises; the pages of the batch's requests are then undefined."""
        with torch.no_grad():
            return self._graph(self._inputs(batch))

    def start(self, batch: PackedBatch) -> Forward:
        """One step, to be advanced part by part."""
        return _GraphForward(self._graph, self._graph.start(self._inputs(batch)))

    def row_costs(self, positions: np.ndarray) -> np.ndarray:
        """As ``ModelRunner`` says, by counting floating point operations: 2 for every weight of a median part, and
        2 (Dk + Dv) for every query head and visible key of its attention."""
        flops = np.zeros(len(positions))
        for layer in self._layers:
            shape = layer.shape
            visible = positions + 1
            if shape.window:
                visible = np.minimum(visible, shape.window)
            if shape.chunk:
                visible = np.minimum(visible, positions % shape.chunk + 1)
            flops += 2 * (shape.qk_dim + shape.v_dim) * shape.num_kv_heads * shape.group * visible
        return 1 + flops / (max(len(self._layers), 1) * self._linear_operations)

    @property
    def linear_operations(self) -> float:
        """Floating point operations of a token outside of attention, in all parts."""
        return self._linear_operations * max(len(self._layers), 1)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of keys and values of a token, over all attention calls."""
        return bytes_per_page(self._layers, self.page_size) / self.page_size

    def with_pages(self, num_pages: int) -> GraphRunner:
        """See ``ModelRunner``."""
        return GraphRunner(
            self._graph,
            self._layers,
            vocab_size=self.vocab_size,
            max_positions=self.max_positions,
            page_size=self.page_size,
            num_pages=num_pages,
        )

    def _inputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        attention = batch.attention
        inputs = {
            **self._pages,
            "input_ids": batch.input_ids,
            "positions": batch.positions,
            "logits_rows": batch.logits_rows,
            "q_offsets": attention.q_offsets,
            "kv_lens": attention.kv_lens,
            "page_table": attention.page_table,
            "slot_mapping": attention.slot_mapping,
        }
        units = torch.get_num_threads()
        for number, layer in self._plans.items():
            plan = plan_tasks(
                attention.q_offsets,
                attention.kv_lens,
                layer.shape,
                page_size=self.page_size,
                units=units,
                device=cpu(units, layer.dtype.itemsize),
            )
            inputs[f"tasks_{number}"], inputs[f"merges_{number}"] = plan.tasks, plan.merges
        return inputs


class _GraphForward:
    """See ``Forward``."""

    def __init__(self, graph: Graph, state: Any) -> None:
        self.num_parts, self.next_part = graph.num_parts, 0
        self._graph, self._state = graph, state

    def advance(self) -> None:
        with torch.no_grad():
            self._graph.advance(self._state, self.next_part, self.next_part + 1)
        self.next_part += 1

    def logits(self) -> torch.Tensor:
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
