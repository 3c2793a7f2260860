"""From a schedule to the tensors of one step.

Chunks lie one after another in the T rows of the step::

    chunk      A: tokens 40..41 (decode)   B: tokens 0..3 (prefill)   C: tokens 8..10 (end of a prefill)
    row        0                           1 2 3                      4 5
    position   40                          0 1 2                      8 9
    q_offsets  0                           1                          4           6
    logits_rows 0                                                     5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chunkc.kernels.metadata import AttentionMetadata
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens ``start : end`` of a request, to be computed in one step; never empty."""

    request: Request
    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """Tokens in the chunk."""
        return self.end - self.start

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the request's last token, so that the step gives the next one."""
        return self.end == self.request.num_tokens


@dataclass(frozen=True)
class PackedBatch:
    """The inputs of one step. CPU tensors, T rows; R requests are in ``attention``.

    Attributes:
        input_ids: int64 ``[T]``.
        positions: int64 ``[T]``, each token's place in its request.
        attention: where keys and values go and what each request sees.
        logits_rows: int64 ``[L]``, L >= 1, increasing: the rows whose logits are wanted. Where no chunk
            samples it holds the last row, whose logits nobody reads, so that no graph ever sees L = 0.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    logits_rows: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """T, the rows of the step."""
        return self.input_ids.shape[0]


def pack(chunks: Sequence[Chunk], pool: PagePool) -> PackedBatch:
    """Packs chunks, at least one, whose pages are in the pool's table.

    Fresh arrays each time: a runner may still read the last step's while the next is packed.
    """
    rows = np.array([chunk.request.row for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    ends = np.array([chunk.end for chunk in chunks], dtype=np.int64)
    lengths = ends - starts
    offsets = np.zeros(len(chunks) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])

    # A row's position is its index shifted by a constant per chunk.
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    width = pool.pages_for(int(ends.max()))
    page_table = pool.table[rows, :width]
    page_index, offset_in_page = np.divmod(positions, pool.page_size)
    owner = np.repeat(np.arange(len(chunks)), lengths)
    slots = page_table[owner, page_index].astype(np.int64) * pool.page_size + offset_in_page
    input_ids = np.concatenate([chunk.request.tokens[chunk.start : chunk.end] for chunk in chunks])

    samples = np.array([chunk.samples for chunk in chunks])
    logits_rows = offsets[1:][samples] - 1 if samples.any() else offsets[-1:] - 1
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        positions=torch.from_numpy(positions),
        attention=AttentionMetadata(
            q_offsets=torch.from_numpy(offsets.astype(np.int32)),
            kv_lens=torch.from_numpy(ends.astype(np.int32)),
            page_table=torch.from_numpy(page_table),
            slot_mapping=torch.from_numpy(slots),
        ),
        logits_rows=torch.from_numpy(logits_rows),
    )
