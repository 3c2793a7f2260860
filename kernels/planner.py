"""The compiled planner: ``planner.cpp``, built at first use in about two seconds (see ``native.py``), and its calls."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from chunkc.errors import ChunkcError
from chunkc.kernels import libraries
from chunkc.kernels.device import TaskCost

if TYPE_CHECKING:
    from chunkc.kernels.tasks import AttentionShape

MAX_Q_BLOCKS = 8

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_tried = False


class _Costs(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_double) for name in ("overhead", "key_first", "key_again", "pair", "row", "partial_row")
    )


class Options(ctypes.Structure):
    """As ``Options`` in planner.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in ("heads", "group", "window", "chunk", "units", "row_tile", "align", "kv_split", "num_q_blocks")
        ),
        ("q_blocks", ctypes.c_int64 * MAX_Q_BLOCKS),
        ("costs", _Costs),
    )


def load() -> ctypes.CDLL | None:
    """The library, built if need be; None where there is no C++ compiler.

    Raises:
        ChunkcError: a compiler is there but could not build the library, or the library does not load.
    """
    global _library, _tried
    if not _tried:
        with _lock:
            if not _tried:
                path = libraries.PLANNER.find_or_build()
                try:
                    _library = None if path is None else _open(path)
                except OSError as error:
                    raise ChunkcError(f"The planner's library {path} does not load: {error}") from error
                _tried = True
    return _library


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    library.chunkc_plan.restype = ctypes.c_bool
    return library


def options(
    shape: AttentionShape, cost: TaskCost, *, align: int, units: int, q_blocks: tuple[int, ...], kv_split: int | None
) -> Options:
    """What the library is asked, but for the batch.

    Args:
        shape: heads, window and chunk.
        cost: of a task where ``units`` of them share the device.
        align: cuts along the keys fall on its multiples.
        units: tasks that run at a time.
        q_blocks: sizes of a block of rows to choose from, increasing, at most MAX_Q_BLOCKS.
        kv_split: most keys in a task, None chooses.
    """
    if len(q_blocks) > MAX_Q_BLOCKS:
        raise ValueError(f"at most {MAX_Q_BLOCKS} sizes of a block can be tried, not {len(q_blocks)}")
    return Options(
        shape.num_kv_heads,
        shape.group,
        shape.window,
        shape.chunk,
        units,
        cost.row_tile,
        align,
        kv_split or 0,
        len(q_blocks),
        (ctypes.c_int64 * MAX_Q_BLOCKS)(*q_blocks),
        _Costs(cost.overhead, cost.key_first, cost.key_again, cost.pair, cost.row, cost.partial_row),
    )


def plan(
    library: ctypes.CDLL, asked: Options, q_offsets: torch.Tensor, kv_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 tasks ``[N, 8]`` and merges ``[M, 8]`` of a batch: contiguous int32 ``[R + 1]`` and ``[R]``, on the CPU.

    Raises:
        MemoryError: for so many tasks.
    """
    counts = (ctypes.c_int64 * 2)()
    if not library.chunkc_plan(
        ctypes.byref(asked),
        ctypes.c_void_p(q_offsets.data_ptr()),
        ctypes.c_void_p(kv_lens.data_ptr()),
        ctypes.c_int64(kv_lens.shape[0]),
        counts,
    ):
        raise MemoryError(f"the plan of {int(q_offsets[-1])} tokens has too many tasks")
    tasks = torch.empty(counts[0], 8, dtype=torch.int32)
    merges = torch.empty(counts[1], 8, dtype=torch.int32)
    library.chunkc_fetch_plan(ctypes.c_void_p(tasks.data_ptr()), ctypes.c_void_p(merges.data_ptr()))
    return tasks, merges
