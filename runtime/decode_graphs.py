"""Decode steps as CUDA graphs: recorded once for a few numbers of requests, replayed for any batch that fits.

Op by op, the host needs longer to start a decode step's kernels than the GPU to run them. A recorded step is started
in one call. It reads its inputs from the same memory each time, so a batch is padded to the recorded number of
requests, width of page table and length of task tables::

    requests       A B C . .        rows of padding: slot -1 (nothing is written), 0 keys, no task
    q_offsets    0 1 2 3 3 3
    tasks          t t t t -1 -1    a row of -1 ends a table

A recorded step belongs to the stream it was recorded on, and to that stream's SMs. What does not fit (longer contexts,
larger batches, batches with prefill chunks) runs op by op as ever.

This has not run on a GPU yet; in its tests a step is "replayed" by computing it anew from the same memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from chunkc.kernels.tasks import Merge, Task
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.step_inputs import DeviceInputs, Layout, Tensors

#: records what a call gives to the current stream; gives what replays it, and the call's result in fixed memory
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]

_CUTS_PER_UNIT = 4  # along the keys; as many tasks as run on an SM at a time, and one


class Computes(Protocol):
    """Runs the whole model; ``GraphRunner`` does."""

    step_inputs: DeviceInputs
    page_size: int

    def compute(self, inputs: Tensors) -> torch.Tensor:
        """Logits [L, V] from inputs on the device."""


def capture_on_gpu(work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """See ``Capture``. Waits for the whole device: for before anything is served, not between steps."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        result = work()
    return graph.replay, result


@dataclass(frozen=True)
class _Recorded:
    """A step for one number of requests on one stream: its inputs' memory, how to start it, and where it writes."""

    layout: Layout
    memory: torch.Tensor
    replay: Callable[[], None]
    logits: torch.Tensor


class DecodeGraphs:
    """See the module's text.

    Args:
        runner: the model.
        layers: its attention calls.
        sizes: numbers of requests to record for.
        longest: tokens of the longest context that fits.
        units: SMs of the device; longer task tables than these need are not recorded for.
        stream: tells the calling thread's stream from others.
        capture: how to record.
    """

    def __init__(
        self,
        runner: Computes,
        layers: Sequence[AttentionLayer],
        *,
        sizes: Sequence[int],
        longest: int,
        units: int,
        stream: Callable[[], int],
        capture: Capture = capture_on_gpu,
    ) -> None:
        self._runner, self._inputs = runner, runner.step_inputs
        self._plans = {layer.plan: layer.shape for layer in layers}
        self._sizes, self._width = sorted(sizes), -(-longest // runner.page_size)
        self._units, self._stream, self._capture = units, stream, capture
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self.replayed = 0  # steps

    def record(self) -> None:
        """Records all sizes for the calling thread's stream. Nothing may be served meanwhile."""
        for size in self._sizes:
            inputs = self._padded({}, size)
            layout = Layout.of(inputs)
            memory = layout.staged(inputs, self._inputs.target).to(self._inputs.target)
            views = layout.views(memory)
            self._runner.compute(views)  # compiles kernels, which cannot be done while recording
            replay, logits = self._capture(lambda views=views: self._runner.compute(views))
            self._recorded[self._stream(), size] = _Recorded(layout, memory, replay, logits)

    def run(self, batch: PackedBatch) -> torch.Tensor | None:
        """Logits [L, V] of a batch of decodes, which the next replay overwrites; None where the batch does not fit."""
        count = batch.num_tokens
        if not count == batch.attention.num_requests == batch.logits_rows.shape[0]:
            return None
        if batch.attention.page_table.shape[1] > self._width:
            return None
        stream = self._stream()
        size = next((size for size in self._sizes if size >= count and (stream, size) in self._recorded), None)
        if size is None:
            return None
        inputs = self._inputs.on_host(batch)
        if any(inputs[name].shape[0] > length for name, length in self._table_lengths(size).items()):
            return None
        recorded = self._recorded[stream, size]
        staged = recorded.layout.staged(self._padded(inputs, size), recorded.memory.device)
        recorded.memory.copy_(staged, non_blocking=True)
        recorded.replay()
        self.replayed += 1
        return recorded.logits[:count]

    def _table_lengths(self, size: int) -> dict[str, int]:
        """Rows of every task table and merge table."""
        lengths = {}
        for number, shape in self._plans.items():
            blocks = size * shape.num_kv_heads
            lengths[f"tasks_{number}"], lengths[f"merges_{number}"] = blocks + _CUTS_PER_UNIT * self._units, blocks
        return lengths

    def _padded(self, inputs: Tensors, size: int) -> Tensors:
        """A batch's inputs (of none, where there are none) in the shapes that were recorded."""
        ends = inputs["q_offsets"] if inputs else torch.zeros(1, dtype=torch.int32)
        shapes = {
            "input_ids": ((size,), torch.int64, 0),
            "positions": ((size,), torch.int64, 0),
            "q_offsets": ((size + 1,), torch.int32, int(ends[-1])),
            "kv_lens": ((size,), torch.int32, 0),
            "page_table": ((size, self._width), torch.int32, 0),
            "slot_mapping": ((size,), torch.int64, -1),
        }
        for name, length in self._table_lengths(size).items():
            columns = len(Task._fields if name.startswith("tasks") else Merge._fields)
            shapes[name] = ((length, columns), torch.int32, -1)
        padded = {name: torch.full(shape, fill, dtype=dtype) for name, (shape, dtype, fill) in shapes.items()}
        for name, tensor in padded.items():
            if name in inputs:
                tensor[tuple(slice(length) for length in inputs[name].shape)] = inputs[name]
        return {**padded, "logits_rows": torch.arange(size)}
