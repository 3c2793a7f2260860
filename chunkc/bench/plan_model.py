"""What a list of attention tasks takes on a device, what it could take, and the grid that others launch.

Costs are those of :mod:`chunkc.kernels.device`, computed here again, in NumPy and from the tasks alone: the planner's
own opinion of its plan is not asked.
"""

from __future__ import annotations

import dataclasses
import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from chunkc.kernels.device import DeviceModel
from chunkc.kernels.tasks import AttentionShape, Task, TaskTable

# vLLM's unified_attention: rows of a tile, keys of a tile, KV segments of a launch of decodes alone, and the largest
# grid without segments that still gets them.
GRID_ROWS, GRID_KEYS, GRID_SEGMENTS, GRID_SMALL = 16, 16, 16, 128


@dataclass(frozen=True, eq=False)
class Batch:
    """New and cached tokens of each request of a step: int64 ``[R]``, and ``q_lens <= kv_lens``."""

    q_lens: np.ndarray
    kv_lens: np.ndarray

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The planner's ``q_offsets`` int32 ``[R + 1]`` and ``kv_lens`` int32 ``[R]``."""
        offsets = np.concatenate([[0], np.cumsum(self.q_lens)]).astype(np.int32)
        return torch.from_numpy(offsets), torch.from_numpy(self.kv_lens.astype(np.int32))

    @property
    def num_tokens(self) -> int:
        return int(self.q_lens.sum())

    @property
    def is_mixed(self) -> bool:
        """Whether some requests have one new token and others several."""
        return 0 < np.count_nonzero(self.q_lens > 1) < len(self.q_lens)


@dataclass(frozen=True)
class Outcome:
    """A list of tasks on a device, in seconds.

    Attributes:
        tasks: how many.
        makespan: until the last unit is done.
        ideal: of the batch, see :func:`ideal_seconds`.
        overhead: the fixed costs and partials of all tasks, over the slots.
        extra: work beyond the ideal, over the slots: keys that are read again, padded rows, causal corners.
        idle: slots waiting for the last one, on average.
    """

    tasks: int
    makespan: float
    ideal: float
    overhead: float
    extra: float
    idle: float

    @property
    def ratio(self) -> float:
        """The makespan in units of the ideal."""
        return self.makespan / self.ideal


def ideal_seconds(batch: Batch, shape: AttentionShape, device: DeviceModel) -> float:
    """The sum of the work over the slots, however it is cut: each request's keys are read once from memory, each
    visible pair is multiplied once, nothing is padded or started, and no slot ever waits."""
    cost = device.task_cost(shape)
    first = batch.kv_lens - batch.q_lens
    keys = batch.kv_lens - _first_visible(first, shape)
    pairs = keys.astype(np.float64)
    for i in np.flatnonzero(batch.q_lens > 1):
        position = np.arange(first[i], batch.kv_lens[i])
        pairs[i] = (position + 1 - _first_visible(position, shape)).sum()
    pairs *= shape.group
    keys, pairs, rows = (np.where(batch.q_lens > 0, x, 0) for x in (keys, pairs, batch.q_lens * shape.group))
    work = cost.row * rows + np.maximum(cost.key_first * keys, cost.pair * pairs)
    return float(work.sum()) * shape.num_kv_heads / device.slots


def simulate(
    tasks: np.ndarray, blocks: np.ndarray, batch: Batch, shape: AttentionShape, device: DeviceModel
) -> Outcome:
    """Every slot takes the next task of the list as soon as it is free.

    Args:
        tasks: int ``[N, 8]``, the columns of :class:`~chunkc.kernels.tasks.Task`.
        blocks: int ``[R]``, into how many blocks the rows of each request are cut.
        batch, shape, device: what is computed, and on what.
    """
    task = Task(*tasks.T.astype(np.int64))
    cost = device.task_cost(shape)
    size = (task.row_end - task.row_begin, task.kv_end - task.kv_begin, blocks[task.request])
    seconds = cost.seconds(*size, task.partial >= 0)
    makespan = list_makespan(seconds.tolist(), device.slots)
    ideal = ideal_seconds(batch, shape, device)
    mean = float(seconds.sum()) / device.slots
    work = (
        float((dataclasses.replace(cost, overhead=0.0, partial_row=cost.row).seconds(*size, False)).sum())
        / device.slots
    )
    return Outcome(
        tasks=len(tasks),
        makespan=makespan,
        ideal=ideal,
        overhead=mean - work,
        extra=work - ideal,
        idle=makespan - mean,
    )


def simulate_plan(table: TaskTable, batch: Batch, shape: AttentionShape, device: DeviceModel) -> Outcome:
    """:func:`simulate` for a plan."""
    tasks = table.tasks.numpy()
    blocks = np.ones(len(batch.q_lens), dtype=np.int64)
    # head 0's first piece of each block
    begins = np.unique(tasks[tasks[:, 1] == 0][:, [0, 2]], axis=0)
    request, count = np.unique(begins[:, 0], return_counts=True)
    blocks[request] = count
    return simulate(tasks, blocks, batch, shape, device)


def list_makespan(costs: list[float], slots: int) -> float:
    """When the last of ``slots`` is done, if each takes the next of ``costs`` whenever it is free."""
    free = [0.0] * slots
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


def simulate_grid(batch: Batch, shape: AttentionShape, device: DeviceModel) -> Outcome:
    """:func:`simulate` for a grid as vLLM launches it (``unified_attention``): tiles of 16 rows packed over the group,
    requests in order, heads outermost; the keys in 16 segments only where every request has one new token and the
    tiles are few."""
    tokens = max(GRID_ROWS // shape.group, 1)
    blocks = -(-batch.q_lens // tokens)
    launched = batch.num_tokens // tokens + len(batch.q_lens)
    is_cut = int(batch.q_lens.max()) <= 1 and launched * shape.num_kv_heads <= GRID_SMALL

    request = np.repeat(np.arange(len(blocks)), blocks)
    index = np.arange(len(request)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    query, q_len = index * tokens, batch.q_lens[request]
    last = np.minimum(query + tokens, q_len)
    first = batch.kv_lens[request] - q_len
    low, high = _first_visible(first + query, shape), first + last
    tile = np.zeros((len(request), 8), dtype=np.int64)
    tile[:, 0], tile[:, 2], tile[:, 3], tile[:, 6] = request, query * shape.group, last * shape.group, -1
    if is_cut:
        segment = -(-high // (GRID_SEGMENTS * GRID_KEYS)) * GRID_KEYS
        pieces = [(np.maximum(low, s * segment), np.minimum(high, (s + 1) * segment)) for s in range(GRID_SEGMENTS)]
        tile[:, 6] = 0
    else:
        pieces = [(low, high)]
    tasks = []
    for begin, end in pieces:
        for head in range(shape.num_kv_heads):
            tile[:, 1], tile[:, 4], tile[:, 5] = head, begin, end
            tasks.append(tile[end > begin].copy())
    return simulate(np.concatenate(tasks), np.maximum(blocks, 1), batch, shape, device)


def _first_visible(position: np.ndarray, shape: AttentionShape) -> np.ndarray:
    """The first key that a query at ``position`` sees."""
    low = np.zeros_like(position)
    if shape.window:
        low = np.maximum(low, position - shape.window + 1)
    if shape.chunk:
        low = np.maximum(low, position // shape.chunk * shape.chunk)
    return low
