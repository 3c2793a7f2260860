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

**Order.** Prefill is bound by arithmetic, decode by memory bandwidth. Each of the two lists is ordered
longest first, then they are interleaved in proportion to their cost, so that they run side by side from the
first task to the last and the short tasks come at the end, where they fill gaps.

**Layout.** ``tasks`` is int32 ``[N, 8]`` with the fields of :class:`Task`, ``merges`` int32 ``[M, 8]`` with
those of :class:`Merge`; ranges are half-open. N and M may be 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

_DEFAULT_Q_BLOCK = 64  # rows: enough to reuse a tile of keys, few enough for their float32 state to stay cached
_TASKS_PER_UNIT = 4  # how many pieces the work of one unit is cut into, for balance at the end of the step
_MIN_SPLIT = 256  # keys: below this a split costs more (start-up, merge) than it evens out
_KEY_COST = 8  # cost of loading one key and value, in units of the arithmetic of one row on it
_SPLIT_ALIGNMENT = 64  # keys: bodies walk the keys in tiles of this many


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
    ``partial + s * (row_end - row_begin)`` and up. The two last columns fill the row up to 32 bytes and are
    0.
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


def row_block(shape: AttentionShape, q_block: int | None = None) -> int:
    """Rows of a full block: ``q_block`` rounded down to whole tokens, unless one token has more rows."""
    q_block = _DEFAULT_Q_BLOCK if q_block is None else q_block
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
    """
    if page_size < 1 or units < 1:
        raise ValueError(f"page_size and units must be positive, not {page_size} and {units}")
    if kv_split is not None and kv_split < 1:
        raise ValueError(f"kv_split must be at least 1 key, not {kv_split}")
    group, heads = shape.group, shape.num_kv_heads
    block = row_block(shape, q_block)
    offsets = q_offsets.numpy().astype(np.int64)
    kv_len = kv_lens.numpy().astype(np.int64)
    q_len = np.diff(offsets)

    # Blocks of rows, for one key/value head: all heads are alike and are added at the end.
    rows = q_len * group
    blocks_per_request = _ceil_div(rows, block)
    request = np.repeat(np.arange(len(q_len)), blocks_per_request)
    row_begin = _ramps(blocks_per_request) * block
    row_end = np.minimum(row_begin + block, rows[request])
    first_query = (kv_len - q_len)[request]
    low, high = _visible_keys(first_query + row_begin // group, first_query + (row_end - 1) // group, shape)
    seen = high > low
    request, row_begin, row_end, low, high = (x[seen] for x in (request, row_begin, row_end, low, high))

    align = min(page_size, _SPLIT_ALIGNMENT)
    num_rows = row_end - row_begin
    is_decode = q_len[request] == 1
    if kv_split is None:
        piece = _balanced_pieces(num_rows, high - low, is_decode, heads, units)
    else:
        piece = np.full(len(request), kv_split)
    # Cuts fall on multiples of `align`. Where `low` does not, the first piece is shorter, but never empty.
    start = low // align * align
    splits = _ceil_div(high - start, _ceil_div(piece, align) * align)
    piece = _ceil_div(_ceil_div(high - start, splits), align) * align  # evened out, which can save a piece
    splits = _ceil_div(high - start, piece)

    # Scratch rows and merges of the blocks in several pieces; head h follows head h - 1.
    is_cut = splits > 1
    scratch = np.where(is_cut, splits * num_rows, 0)
    scratch_begin, scratch_per_head = np.cumsum(scratch) - scratch, int(scratch.sum())
    merge_index, merges_per_head = np.cumsum(is_cut) - 1, int(is_cut.sum())

    source = np.repeat(np.arange(len(request)), splits)
    index = _ramps(splits)
    kv_begin = np.maximum(start[source] + index * piece[source], low[source])
    kv_end = np.minimum(start[source] + (index + 1) * piece[source], high[source])
    cost = (kv_end - kv_begin) * (_KEY_COST + num_rows[source])
    order = _interleave(cost, is_decode[source])
    source, index, kv_begin, kv_end = (x[order] for x in (source, index, kv_begin, kv_end))

    head = np.arange(heads)
    cut = is_cut[source][:, None]
    partial = (scratch_begin[source] + index * num_rows[source])[:, None] + head * scratch_per_head
    merge = merge_index[source][:, None] + head * merges_per_head
    tasks = np.empty((len(source), heads, 8), dtype=np.int32)
    for column, value in enumerate(
        Task(
            request=request[source][:, None],
            kv_head=head,
            row_begin=row_begin[source][:, None],
            row_end=row_end[source][:, None],
            kv_begin=kv_begin[:, None],
            kv_end=kv_end[:, None],
            partial=np.where(cut, partial, -1),
            merge=np.where(cut, merge, -1),
        )
    ):
        tasks[:, :, column] = value

    merges = np.zeros((heads, merges_per_head, 8), dtype=np.int32)
    for column, value in enumerate(
        Merge(
            request=request[is_cut],
            kv_head=head[:, None],
            row_begin=row_begin[is_cut],
            row_end=row_end[is_cut],
            partial=scratch_begin[is_cut] + head[:, None] * scratch_per_head,
            num_splits=splits[is_cut],
        )
    ):
        merges[:, :, column] = value
    return TaskTable(torch.from_numpy(tasks.reshape(-1, 8)), torch.from_numpy(merges.reshape(-1, 8)))


def _visible_keys(first: np.ndarray, last: np.ndarray, shape: AttentionShape) -> tuple[np.ndarray, np.ndarray]:
    """Half-open range of the keys that any query at positions ``first .. last`` (inclusive) sees."""
    low = np.zeros_like(first)
    if shape.window:
        low = np.maximum(low, first - shape.window + 1)
    if shape.chunk:
        low = np.maximum(low, first // shape.chunk * shape.chunk)
    return low, last + 1


def _balanced_pieces(
    num_rows: np.ndarray, num_keys: np.ndarray, is_decode: np.ndarray, heads: int, units: int
) -> np.ndarray:
    """Keys per task at which no task costs much more than a unit's share of the step divided by
    _TASKS_PER_UNIT.

    Only decodes are cut, unless the blocks are too few to give every unit one: a cut prefill reads its
    queries again and writes partials for all its rows.
    """
    row_cost = _KEY_COST + num_rows
    share = (num_keys * row_cost).sum() * heads / (units * _TASKS_PER_UNIT)
    piece = np.maximum((share / row_cost).astype(np.int64), _MIN_SPLIT)
    if len(num_rows) * heads >= units:
        piece = np.where(is_decode, piece, num_keys + _SPLIT_ALIGNMENT)  # in one piece
    return piece


def _interleave(cost: np.ndarray, is_decode: np.ndarray) -> np.ndarray:
    """Task order: prefills and decodes each longest first, both progressing at one share of their cost."""
    order = np.argsort(-cost, kind="stable")
    progress = np.empty(len(cost))
    for kind in (False, True):
        chosen = order[is_decode[order] == kind]
        done = np.cumsum(cost[chosen])
        progress[chosen] = (done - cost[chosen]) / done[-1] if len(done) else 0.0
    return order[np.argsort(progress[order], kind="stable")]


def _ceil_div(a: np.ndarray, b: np.ndarray | int) -> np.ndarray:
    return -(-a // b)


def _ramps(lengths: np.ndarray) -> np.ndarray:
    """``[0, 1, .., lengths[0]-1, 0, 1, .., lengths[1]-1, ..]``"""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
