"""What a device can do, and what a task of :mod:`chunkc.kernels.tasks` costs on it.

The planner needs ratios: memory against arithmetic, both against the fixed cost of a task. They decide how many rows
share a read of the keys, how far it pays to cut, and what to start first. A wrong number makes a plan slower, never
wrong.

**The cost of a task.** Every one of the ``slots`` tasks that run at a time has its share of the device: of its memory
bandwidth, of its cache bandwidth, of its matrix rate. In seconds of such a slot::

    cost = overhead + (row or partial_row) * rows + max(key * keys, pair * padded_rows * keys)

    overhead        taking the task: queue, page table, the latency of the first keys
    row             reading a row's query and writing its output
    partial_row     for the pieces of a cut block, in place of `row`: reading the query again, from the cache; writing
                    the float32 partial there and reading it to merge; half an output, as there are two pieces or more
    key             reading a key and value. A request's n blocks of rows run side by side; one of them reads from
                    memory, the others from the cache: (first + (n - 1) * again) / n
    pair            the arithmetic of a row on a key; rows are padded to what a matrix instruction takes
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from chunkc.kernels.tasks import AttentionShape

_PARTIAL_ITEMSIZE = 4  # bytes: partials are float32
_STATS = 2  # numbers beside a row of a partial: peak and total


@dataclass(frozen=True)
class TaskCost:
    """The terms of the module's formula for one shape on one device, in seconds of a slot.

    Attributes:
        overhead: per task.
        key_first, key_again: per key, read from memory or from the cache.
        pair: per row and key.
        row, partial_row: per row.
        row_tile: rows are padded to a multiple of it.
    """

    overhead: float
    key_first: float
    key_again: float
    pair: float
    row: float
    partial_row: float
    row_tile: int

    def seconds(self, rows: Any, keys: Any, blocks: Any, is_piece: Any) -> Any:
        """What tasks cost; all arguments are NumPy arrays, or numbers.

        Args:
            rows, keys: of the task.
            blocks: into how many blocks the rows of its request are cut.
            is_piece: whether it writes a partial.
        """
        key = (self.key_first + (blocks - 1) * self.key_again) / blocks
        padded = -(-rows // self.row_tile) * self.row_tile
        row = self.row + is_piece * (self.partial_row - self.row)
        return self.overhead + row * rows + np.maximum(key, self.pair * padded) * keys


@dataclass(frozen=True)
class DeviceModel:
    """A device as the planner sees it. Rates are what attention reaches, not what the data sheet says.

    Attributes:
        name: for people.
        units: SMs, or CPU threads.
        occupancy: tasks that a unit runs at a time.
        bandwidth: bytes/s from memory, all units together.
        cache_bandwidth: bytes/s of keys that another task has just read, all units together.
        matrix_rate: flop/s, all units together.
        task_overhead: seconds from taking a task to its first arithmetic, and from its last to the next.
        itemsize: bytes of an element of the cache.
        row_tile: rows of a matrix instruction.
        q_blocks: sizes of a block of rows to choose from.
    """

    name: str
    units: int
    occupancy: int
    bandwidth: float
    cache_bandwidth: float
    matrix_rate: float
    task_overhead: float
    itemsize: int
    row_tile: int
    q_blocks: tuple[int, ...]

    def __post_init__(self) -> None:
        rates = (self.bandwidth, self.cache_bandwidth, self.matrix_rate)
        counts = (self.units, self.occupancy, self.itemsize, self.row_tile, *self.q_blocks)
        if min(rates) <= 0 or min(counts) < 1 or self.task_overhead < 0 or not self.q_blocks:
            raise ValueError(f"rates and counts of a device must be positive: {self}")

    @property
    def slots(self) -> int:
        """Tasks that the device runs at a time."""
        return self.units * self.occupancy

    def task_cost(self, shape: AttentionShape, slots: int | None = None) -> TaskCost:
        """The cost of tasks of a shape where ``slots`` of them share the device; None: as many as it runs."""
        slots = self.slots if slots is None else slots
        dims = shape.qk_dim + shape.v_dim
        memory, cache = slots / self.bandwidth, slots / self.cache_bandwidth
        return TaskCost(
            overhead=self.task_overhead,
            key_first=dims * self.itemsize * memory,
            key_again=dims * self.itemsize * cache,
            pair=2 * dims * slots / self.matrix_rate,
            row=dims * self.itemsize * memory,
            partial_row=(shape.qk_dim * self.itemsize + 2 * (shape.v_dim + _STATS) * _PARTIAL_ITEMSIZE) * cache
            + shape.v_dim * self.itemsize * memory / 2,
            row_tile=self.row_tile,
        )


# Of the data sheet's bandwidth 85% count, which is what decode attention reaches (others measured 83% of 4.8 TB/s on an
# H200). Matrix rate: FlashAttention-3 in 16 bits at head dim 128. Cache: reads that hit L2, by micro-benchmarks of
# others. Overhead: an estimate, from the loads that a task waits for one after the other before its first product
# (queue, task, lengths, page table, keys: 0.15 to 0.4 us each). None of it was measured by us. An SM holds one block of
# 128 rows, so it counts as one; where it runs two smaller ones, each hides the overhead of the other.
H100 = DeviceModel("h100", 132, 1, 2.85e12, 5.5e12, 600e12, 1e-6, 2, 16, (16, 32, 64, 128))
H200 = DeviceModel("h200", 132, 1, 4.1e12, 5.5e12, 600e12, 1e-6, 2, 16, (16, 32, 64, 128))


@lru_cache
def cpu(threads: int, itemsize: int = 4) -> DeviceModel:
    """A CPU as so many cores of a server.

    Each counts with what it reads from memory beside the others, what it packs again out of its caches, and the rate
    of its 512 bit vectors (float32 FMAs, or bfloat16 dot products). There is one size of a block, which fits the
    caches: a chunk of 512 tokens took about the same time, within a tenth, in blocks of 32 to 256 rows.
    """
    rate = 100e9 if itemsize == 4 else 200e9
    return DeviceModel("cpu", threads, 1, threads * 20e9, threads * 40e9, threads * rate, 1e-6, itemsize, 1, (64,))


def cuda(properties: Any, *, occupancy: int = 1, itemsize: int = 2) -> DeviceModel:
    """The model of the GPU with the given ``torch.cuda.get_device_properties``.

    Its clocks and widths say what the data sheet says; as with the presets, 85% of that bandwidth and 60% of that
    matrix rate count. Where torch does not tell them (before 2.12), an H100 of as many SMs is assumed.
    """
    units = properties.multi_processor_count
    scale = units / H100.units
    bandwidth, rate = H100.bandwidth * scale, H100.matrix_rate * scale
    if getattr(properties, "memory_clock_rate", 0) and getattr(properties, "memory_bus_width", 0):
        bandwidth = 0.85 * 2 * properties.memory_clock_rate * 1e3 * properties.memory_bus_width / 8  # kHz, bits
    if getattr(properties, "clock_rate", 0):
        per_cycle = 4096 if properties.major >= 9 else 2048  # dense 16 bit flop of an SM
        rate = 0.6 * per_cycle * units * properties.clock_rate * 1e3
    cache = max(H100.cache_bandwidth * scale, bandwidth)
    return DeviceModel(
        properties.name, units, occupancy, bandwidth, cache, rate, H100.task_overhead, itemsize, 16, H100.q_blocks
    )
