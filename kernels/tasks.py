"""The plan of one step's attention: a list of block-level tasks, and how their partial results are merged.

**Rows.** The unit of query work is a *row*: one query token and one of the ``group`` query heads that share a
key/value head. Within a request and a key/value head, rows are numbered ``row = query_index * group + g``
(query head ``kv_head * group + g``), so that all rows that read the same keys lie side by side.

**Tasks.** A task is (request, key/value head, at most ``q_block`` rows, a range of keys). Prefill chunks are
cut along the rows, decodes along the keys::

                    keys ->                                          0      kv_split   2 kv_split    kv_len
    prefill       0        prefix         kv_len            decode   +---------+---------+---------+
    rows        +----------------+-.                        1 token  | split 0 | split 1 | split 2 |
     |  task 0  |################|###.                      x group  +---------+---------+---------+
     v          +----------------+-----.                                  \\         |         /
        task 1  |################|#######.                                 partial (acc, peak, total)
                +----------------+---------.                                        |
        task 2  |################|###########.                                    merge
                +----------------+-------------                                     |
                                 causal end                                       output

The two cuts are independent: a prefill block is cut along the keys too where all blocks together cannot
occupy the machine. The key range of a block is first clipped to what its rows can see (causal end, sliding
window, chunk) and only then cut, so no task is empty, and every (row, visible key) pair lies in exactly one
task. Rows that see nothing at all (padding) have no task. A block in one piece writes the output; the pieces
of a cut block write float32 partials, and one merge per block adds them up in the order of the keys, so that
results do not depend on who finishes first.

**What is chosen**, by the cost model of :mod:`chunkc.kernels.device`:

- The rows of a block. Large blocks read the keys fewer times; small ones fill the machine and leave less of a
  causal corner that is computed for nothing. One size for the step, the one with the least predicted time.
- Where to cut along the keys. If the blocks as they are keep the units busy to the end, nowhere. Else the
  units are filled one after the other up to their share of the work, and a block that does not fit is cut
  there and goes on on the next unit (McNaughton's rule), so there are hardly more cuts than units. A cut
  depends on what is left of the share, not on how long anyone's queries or keys are.
- **Order.** Units take the next task as they get free. Prefill is bound by arithmetic, decode by memory
  bandwidth: each is ordered longest first, and the two progress at one share of their cost, so that they run
  side by side from the first task to the last and short tasks come at the end, where they fill gaps. A task
  that would end after all others from its place there goes earlier.

The plan is a function of the batch, the shape and the device. It is made in C++ (``planner.cpp``). Without a C++
compiler :func:`plain_plan` serves: a plan as right, and not balanced.

**Layout.** ``tasks`` is int32 ``[N, 8]`` with the fields of :class:`Task`, ``merges`` int32 ``[M, 8]`` with
those of :class:`Merge`; ranges are half-open. N and M may be 0.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from chunkc.kernels import planner
from chunkc.kernels.device import DeviceModel, cpu

_SPLIT_ALIGNMENT = 64  # keys: bodies walk the keys in tiles of this many
_PLAIN_Q_BLOCK = 64  # rows


@dataclass(frozen=True)
class AttentionShape:
    """What a plan depends on besides the batch. Attentions of equal shape share one plan, so this is its key.

    Attributes:
        num_q_heads, num_kv_heads: heads; the first is a multiple of the second.
        qk_dim, v_dim: elements of a query or key, and of a value.
        window: sliding window in keys (the query's own included), 0 = none.
        chunk: length of the chunks that attention does not cross, 0 = none.
    """

    num_q_heads: int
    num_kv_heads: int
    qk_dim: int
    v_dim: int
    window: int = 0
    chunk: int = 0

    def __post_init__(self) -> None:
        if min(self.num_q_heads, self.num_kv_heads, self.qk_dim, self.v_dim) < 1:
            raise ValueError(f"heads and dims must be positive: {self}")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_q_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.window < 0 or self.chunk < 0:
            raise ValueError(f"window and chunk must be 0 (none) or positive: {self}")

    @property
    def group(self) -> int:
        """Query heads per key/value head, i.e. rows per query token."""
        return self.num_q_heads // self.num_kv_heads


class Task(NamedTuple):
    """One row of ``TaskTable.tasks``.

    ``partial`` is -1 if the task writes the output, else the index of its first row in the float32 scratch of
    partial results; ``merge`` is -1 or the row of ``TaskTable.merges`` that the partial belongs to.
    """

    request: int
    kv_head: int
    row_begin: int
    row_end: int
    kv_begin: int
    kv_end: int
    partial: int
    merge: int


class Merge(NamedTuple):
    """One row of ``TaskTable.merges``.

    Piece ``s`` of ``num_splits`` (in the order of the keys) holds its rows at scratch rows
    ``partial + s * (row_end - row_begin)`` and up; the merges lie in the scratch in the order of the table. The two
    last columns fill the row up to 32 bytes and are 0.
    """

    request: int
    kv_head: int
    row_begin: int
    row_end: int
    partial: int
    num_splits: int
    unused0: int = 0
    unused1: int = 0


@dataclass(frozen=True)
class TaskTable:
    """A step's plan: ``tasks`` int32 ``[N, 8]`` in the order to take them, ``merges`` int32 ``[M, 8]``, on
    the CPU."""

    tasks: torch.Tensor
    merges: torch.Tensor


def row_block(shape: AttentionShape, q_block: int) -> int:
    """Rows of a full block: ``q_block`` rounded down to whole tokens, unless one token has more rows."""
    if q_block < 1:
        raise ValueError(f"q_block must be at least 1 row, not {q_block}")
    return q_block - q_block % shape.group if q_block >= shape.group else q_block


def plan_tasks(
    q_offsets: torch.Tensor,
    kv_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    page_size: int,
    units: int,
    q_block: int | None = None,
    kv_split: int | None = None,
    device: DeviceModel | None = None,
) -> TaskTable:
    """Plan one step, for all attentions of one shape.

    Args:
        q_offsets: int32 ``[R + 1]``, see :class:`~chunkc.kernels.metadata.AttentionMetadata`.
        kv_lens: int32 ``[R]``.
        shape: heads, dims and mask of the attention.
        page_size: tokens per page; cuts along the keys fall on page boundaries (or on tiles of 64 in larger
            pages).
        units: how many tasks the machine runs at a time (CPU threads, or SMs x occupancy).
        q_block: most rows in a task, see :func:`row_block`; None chooses.
        kv_split: most keys in a task (rounded up to the cut boundaries); None cuts where that balances the
            load.
        device: what the machine can do; ``units`` tasks share it. None stands for a CPU of ``units`` threads.
    """
    options = _options(shape, page_size, units, q_block, kv_split, device)
    if q_offsets.shape[0] != kv_lens.shape[0] + 1:
        raise ValueError(f"q_offsets {tuple(q_offsets.shape)} and kv_lens {tuple(kv_lens.shape)} do not fit together")
    library = planner.load()
    if library is None:
        return plain_plan(q_offsets, kv_lens, shape, page_size=page_size, q_block=q_block, kv_split=kv_split)
    return TaskTable(*planner.plan(library, options, _int32(q_offsets), _int32(kv_lens)))


def plain_plan(
    q_offsets: torch.Tensor,
    kv_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    page_size: int,
    q_block: int | None = None,
    kv_split: int | None = None,
) -> TaskTable:
    """The simplest plan there is: blocks in the order of the requests, cut along the keys only at ``kv_split``.

    Arguments as for :func:`plan_tasks`.
    """
    block, align = row_block(shape, q_block or _PLAIN_Q_BLOCK), _cut_alignment(page_size)
    offsets, lens = q_offsets.tolist(), kv_lens.tolist()
    tasks: list[Task] = []
    merges: list[Merge] = []
    scratch = 0
    for request, kv_len in enumerate(lens):
        q_len = offsets[request + 1] - offsets[request]
        rows, first = q_len * shape.group, kv_len - q_len
        for head in range(shape.num_kv_heads):
            for begin in range(0, rows, block):
                end = min(begin + block, rows)
                low, high = _visible_keys(first + begin // shape.group, first + (end - 1) // shape.group, shape)
                if low >= high:
                    continue
                step = high if kv_split is None else -(-kv_split // align) * align
                cuts = [low, *range(low // step * step + step, high, step), high]
                where, is_cut = (request, head, begin, end), len(cuts) > 2
                if is_cut:
                    merges.append(Merge(*where, partial=scratch, num_splits=len(cuts) - 1))
                for piece in itertools.pairwise(cuts):
                    tasks.append(Task(*where, *piece, *((scratch, len(merges) - 1) if is_cut else (-1, -1))))
                    scratch += is_cut * (end - begin)
    return TaskTable(*(torch.tensor(table, dtype=torch.int32).reshape(-1, 8) for table in (tasks, merges)))


@lru_cache(maxsize=256)
def _options(
    shape: AttentionShape,
    page_size: int,
    units: int,
    q_block: int | None,
    kv_split: int | None,
    device: DeviceModel | None,
) -> planner.Options:
    """Checks the options of :func:`plan_tasks`, once for all steps, and puts them as the library takes them."""
    if page_size < 1 or units < 1:
        raise ValueError(f"page_size and units must be positive, not {page_size} and {units}")
    if kv_split is not None and kv_split < 1:
        raise ValueError(f"kv_split must be at least 1 key, not {kv_split}")
    device = device or cpu(units)
    q_blocks = device.q_blocks if q_block is None else (q_block,)
    return planner.options(
        shape,
        device.task_cost(shape, units),
        align=_cut_alignment(page_size),
        units=units,
        q_blocks=tuple(sorted({row_block(shape, size) for size in q_blocks})),
        kv_split=kv_split,
    )


def _cut_alignment(page_size: int) -> int:
    return min(page_size, _SPLIT_ALIGNMENT)


def _visible_keys(first: int, last: int, shape: AttentionShape) -> tuple[int, int]:
    """Half-open range of the keys that any query at positions ``first .. last`` (inclusive) sees."""
    low = max(0, first - shape.window + 1) if shape.window else 0
    if shape.chunk:
        low = max(low, first // shape.chunk * shape.chunk)
    return low, last + 1


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the library reads it; itself, as a rule."""
    if tensor.dtype == torch.int32 and tensor.is_contiguous() and tensor.device.type == "cpu":
        return tensor
    narrow = tensor.to("cpu", torch.int32).contiguous()
    if not torch.equal(narrow.long(), tensor.cpu().long()):
        raise ValueError("numbers of tokens must be integers of 32 bits")
    return narrow
