"""The description of one step's ragged batch, as the attention bodies and the planner read it.

A step packs the new tokens of R requests one after another into T rows. Request ``r`` owns the rows
``q_offsets[r] : q_offsets[r + 1]``; with them its cache holds ``kv_lens[r]`` tokens. The new tokens are the
last ones of the request (bottom-right alignment): its query ``i`` stands at position ``kv_len - q_len + i``::

    positions      0 1 2 3 4 5 6 7          kv_len = 8, q_len = 3
    keys           k k k k k K K K          K: appended by this step
    queries                  0 1 2          query 0 sees keys 0..5, query 2 sees keys 0..7
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionMetadata:
    """One step's batch, request by request. All tensors are on the CPU; R >= 1 requests, T >= 1 tokens.

    Attributes:
        q_offsets: int32 ``[R + 1]``, row range of each request; ``q_offsets[0] == 0``. A request may own no
            row.
        kv_lens: int32 ``[R]``, tokens in each request's cache, this step's tokens included.
        page_table: int32 ``[R, P]``, page ids; row ``r`` is valid up to ``ceil(kv_lens[r] / page_size)``
            entries, what follows is never read.
        slot_mapping: int64 ``[T]``, where each token's key and value go: ``page * page_size + offset``,
            or -1 for a row that is padding and writes nothing.
    """

    q_offsets: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    slot_mapping: torch.Tensor

    @property
    def num_requests(self) -> int:
        """R, the number of requests in the batch."""
        return self.kv_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """T, the number of rows in the batch, padding included."""
        return self.slot_mapping.shape[0]
