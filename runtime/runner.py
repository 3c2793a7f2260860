"""Runs the compiled graph on packed batches; owns the memory of the key/value pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from chunkc.errors import CapacityError
from chunkc.kernels.cpu_memory import prefer_huge_pages
from chunkc.kernels.device import cpu
from chunkc.kernels.tasks import plan_tasks
from chunkc.passes.page_attention import AttentionLayer
from chunkc.runtime.batch import PackedBatch


class ModelRunner(Protocol):
    """What an engine needs of a model.

    Attributes:
        vocab_size: token ids are below it.
        max_positions: longest sequence the model is defined for, in tokens.
        page_size: tokens per page.
        num_pages: pages in the key/value cache.
    """

    vocab_size: int
    max_positions: int
    page_size: int
    num_pages: int

    def run(self, batch: PackedBatch) -> torch.Tensor:
        """Write the batch's keys and values to their pages; logits [L, V] of ``batch.logits_rows``."""


class GraphRunner:
    """A ``ModelRunner`` over one graph, compiled or not.

    Args:
        graph: takes the step's inputs by name (see ``passes.page_attention`` and ``passes.gather_logits``),
            writes pages in place, returns logits [L, V].
        layers: the graph's attention calls, in order.
        vocab_size, max_positions, page_size, num_pages: see ``ModelRunner``.

    Raises:
        CapacityError: the pages do not fit into memory.
    """

    def __init__(
        self,
        graph: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
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
        self._graph = graph
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
        with torch.no_grad():
            return self._graph(inputs)


def bytes_per_page(layers: Sequence[AttentionLayer], page_size: int) -> int:
    """Bytes that one page takes over all attention calls, keys and values together."""
    return sum(
        layer.shape.num_kv_heads * page_size * (layer.shape.qk_dim + layer.shape.v_dim) * layer.dtype.itemsize
        for layer in layers
    )
