"""Random inputs of ``chunkc::mixed_attention`` and the tolerance of its results: what tests, fuzzing and
benchmarks draw from.

A case keeps each request's keys and values in one piece besides the pages they are scattered over, so that an
oracle need not know about pages at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from chunkc.kernels.metadata import AttentionMetadata
from chunkc.kernels.ops import mixed_attention
from chunkc.kernels.tasks import AttentionShape, TaskTable, plan_tasks


@dataclass(frozen=True)
class MixedCase:
    """One call of ``chunkc::mixed_attention``, before this step's keys and values are appended.

    Attributes:
        shape: heads, dims, window and chunk.
        q, k, v: ``[T, Hq, Dk]``, ``[T, Hkv, Dk]``, ``[T, Hkv, Dv]``, the step's tokens.
        k_pages, v_pages: ``[num_pages, Hkv, page_size, D]``, filled with the tokens of earlier steps.
        metadata: the batch.
        sinks: ``[Hq]`` or None.
        alibi_slopes: float32 ``[Hq]`` or None.
        scale, softcap: of the scores.
        keys, values: per request ``[kv_len, Hkv, D]``, earlier tokens and this step's.
    """

    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    metadata: AttentionMetadata
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    scale: float
    softcap: float
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def plan(self, *, units: int = 2, q_block: int | None = None, kv_split: int | None = None) -> TaskTable:
        """The task table of this batch."""
        return plan_tasks(
            self.metadata.q_offsets,
            self.metadata.kv_lens,
            self.shape,
            page_size=self.k_pages.shape[2],
            units=units,
            q_block=q_block,
            kv_split=kv_split,
        )

    def arguments(self, table: TaskTable) -> tuple:
        """The operator's arguments; the pages are copies, as the operator writes to them."""
        m = self.metadata
        batch = (m.q_offsets, m.kv_lens, m.page_table, m.slot_mapping, table.tasks, table.merges)
        meaning = (self.sinks, self.alibi_slopes, self.scale, self.shape.window, self.shape.chunk, self.softcap)
        return (self.q, self.k, self.v, self.k_pages.clone(), self.v_pages.clone(), *batch, *meaning)

    def run(self, table: TaskTable | None = None) -> torch.Tensor:
        """The operator's result ``[T, Hq, Dv]``, by whichever body is active."""
        return mixed_attention(*self.arguments(table or self.plan()))


def make_case(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    shape: AttentionShape,
    *,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    alibi: bool = False,
    softcap: float = 0.0,
    score_std: float = 1.0,
    padding: int = 0,
    seed: int = 0,
) -> MixedCase:
    """A random case.

    Args:
        q_lens, kv_lens: per request, new tokens and cached tokens including them (``q_len <= kv_len``).
        shape: heads, dims, window and chunk.
        page_size: tokens per page.
        dtype: of all tensors.
        sinks: with random sinks.
        alibi: with slopes from 2 down to 2**-8, each third one negative (far keys weigh most).
        softcap: 0 for none.
        score_std: standard deviation of the scores, to reach saturated softmaxes and huge logits.
        padding: rows after the last request's that write no slot and belong to no request.
        seed: of everything random, the placement of pages included.

    Every slot that holds no visible token is NaN: the unused pages and tails of pages, and what lies before
    every window or chunk of the step. Page table entries beyond a request's pages are -1.
    """
    if any(q > kv for q, kv in zip(q_lens, kv_lens, strict=True)):
        raise ValueError("a request cannot have more new tokens than tokens")
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    heads, total = shape.num_kv_heads, sum(q_lens) + padding
    q_offsets = torch.tensor([0, *q_lens]).cumsum(0).int()
    pages_per_request = [-(-n // page_size) for n in kv_lens]
    num_pages = sum(pages_per_request) + 3
    free = torch.randperm(num_pages, generator=generator).tolist()
    page_table = torch.full((len(q_lens), max(*pages_per_request, 1)), -1, dtype=torch.int32)
    slot_mapping = torch.full((total,), -1, dtype=torch.int64)

    q = normal(total, shape.num_q_heads, shape.qk_dim)
    k, v = normal(total, heads, shape.qk_dim), normal(total, heads, shape.v_dim)
    k_pages = torch.full((num_pages, heads, page_size, shape.qk_dim), math.nan, dtype=dtype)
    v_pages = torch.full((num_pages, heads, page_size, shape.v_dim), math.nan, dtype=dtype)
    keys, values = [], []
    for r, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        pages = torch.tensor([free.pop() for _ in range(pages_per_request[r])], dtype=torch.int64)
        page_table[r, : len(pages)] = pages.int()
        first, prefix = int(q_offsets[r]), kv_len - q_len
        keys.append(torch.cat([normal(prefix, heads, shape.qk_dim), k[first : first + q_len]]))
        values.append(torch.cat([normal(prefix, heads, shape.v_dim), v[first : first + q_len]]))
        position = torch.arange(kv_len)
        slots = pages[position // page_size] * page_size + position % page_size
        slot_mapping[first : first + q_len] = slots[prefix:]
        oldest = max(0, prefix - shape.window + 1) if shape.window else 0
        if shape.chunk:
            oldest = max(oldest, prefix // shape.chunk * shape.chunk)
        live = slots[oldest:prefix]
        k_pages[live // page_size, :, live % page_size] = keys[r][oldest:prefix]
        v_pages[live // page_size, :, live % page_size] = values[r][oldest:prefix]

    return MixedCase(
        shape=shape,
        q=q,
        k=k,
        v=v,
        k_pages=k_pages,
        v_pages=v_pages,
        metadata=AttentionMetadata(q_offsets, torch.tensor(kv_lens, dtype=torch.int32), page_table, slot_mapping),
        sinks=normal(shape.num_q_heads) if sinks else None,
        alibi_slopes=_slopes(shape.num_q_heads) if alibi else None,
        scale=score_std / math.sqrt(shape.qk_dim),
        softcap=softcap,
        keys=keys,
        values=values,
    )


def _slopes(heads: int) -> torch.Tensor:
    slopes = torch.logspace(1, -8, heads, base=2.0)
    slopes[2::3] *= -1
    return slopes


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    """``rtol`` and ``atol`` against exact arithmetic on the same inputs, for values of about unit variance.

    The error is that of float32 sums (of scores up to about 50) and the rounding of the result to ``dtype``. In
    bfloat16 a body may also round the weights of the softmax: each is then off by up to eps / 2 of itself, and the
    result by up to eps / 2 times the mean distance of the values from it (about 1, more where few keys weigh much)
    if the weights still sum up to 1. Measured against float64 in 2e8 elements, what remains beyond ``rtol`` is up
    to 0.63 eps with rounded weights and below 1e-6 with float32 ones; the root mean square of all errors grows by
    1% where a few keys weigh most and by 30% in wide averages (from 1.1e-4 to 1.4e-4 over 700 keys).
    """
    eps = torch.finfo(dtype).eps
    return {"rtol": max(1e-5, eps), "atol": 0.75 * eps if dtype == torch.bfloat16 else 2e-5}
