"""The batches of the kernel benchmark, and how torch computes the same: request by request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from chunkc.config import DEFAULT_PAGE_SIZE
from chunkc.kernels.cpu_memory import prefer_huge_pages
from chunkc.kernels.metadata import AttentionMetadata
from chunkc.kernels.tasks import AttentionShape, plan_tasks


@dataclass(frozen=True)
class Batch:
    """A batch by the lengths of its requests: new tokens, and tokens with them."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]

    def bytes(self, shape: AttentionShape, dtype: torch.dtype) -> int:
        """Of the keys and values that are read, each once."""
        return sum(self.kv_lens) * shape.num_kv_heads * (shape.qk_dim + shape.v_dim) * dtype.itemsize

    def operations(self, shape: AttentionShape) -> int:
        """Of the two products, over the pairs of query and key that the causal mask leaves."""
        pairs = sum(q * kv - q * (q - 1) // 2 for q, kv in zip(self.q_lens, self.kv_lens, strict=True))
        return 2 * pairs * shape.num_q_heads * (shape.qk_dim + shape.v_dim)


@dataclass(frozen=True)
class Inputs:
    """Random tensors of a batch. Keys and values lie in pages anywhere, as in a cache that has been in use."""

    batch: Batch
    shape: AttentionShape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    metadata: AttentionMetadata

    @classmethod
    def make(
        cls,
        batch: Batch,
        shape: AttentionShape,
        dtype: torch.dtype,
        page_size: int = DEFAULT_PAGE_SIZE,
        huge_pages: bool = True,
    ) -> Inputs:
        pages = [-(-kv // page_size) for kv in batch.kv_lens]
        order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
        page_table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
        slots = []
        for r, (own, q, kv) in enumerate(zip(order.split(pages), batch.q_lens, batch.kv_lens, strict=True)):
            page_table[r, : len(own)] = own.int()
            position = torch.arange(kv - q, kv)
            slots.append(own[position // page_size] * page_size + position % page_size)
        tokens, heads = sum(batch.q_lens), shape.num_kv_heads

        def random(*size: int) -> torch.Tensor:
            tensor = torch.empty(*size, dtype=dtype)
            if huge_pages:
                prefer_huge_pages(tensor)
            return tensor.uniform_(-1, 1)

        return cls(
            batch,
            shape,
            random(tokens, shape.num_q_heads, shape.qk_dim),
            random(tokens, heads, shape.qk_dim),
            random(tokens, heads, shape.v_dim),
            random(sum(pages), heads, page_size, shape.qk_dim),
            random(sum(pages), heads, page_size, shape.v_dim),
            AttentionMetadata(
                torch.tensor([0, *batch.q_lens]).cumsum(0).int(),
                torch.tensor(batch.kv_lens, dtype=torch.int32),
                page_table,
                torch.cat(slots),
            ),
        )

    def ours(self, threads: int) -> Callable[[], torch.Tensor]:
        """The operator on a plan for so many threads."""
        m, shape = self.metadata, self.shape
        plan = plan_tasks(m.q_offsets, m.kv_lens, shape, page_size=self.page_size, units=threads)
        batch = (m.q_offsets, m.kv_lens, m.page_table, m.slot_mapping, plan.tasks, plan.merges)
        arguments = (self.q, self.k, self.v, self.k_pages, self.v_pages, *batch, None, None, self.scale, 0, 0, 0.0)
        operator = torch.ops.chunkc.mixed_attention.default
        return lambda: operator(*arguments)

    def sdpa(self) -> Callable[[], None]:
        """torch's ``scaled_dot_product_attention``, a call per request, on keys and values in one piece."""

        def call() -> None:
            for q, k, v, mask in self._dense:
                causal = mask is None and q.shape[2] > 1
                F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=True)

        return call

    def flex(self) -> Callable[[], torch.Tensor] | None:
        """Compiled ``flex_attention``, a call for all requests; None where their lengths differ."""
        if len(set(self.batch.q_lens)) > 1 or len(set(self.batch.kv_lens)) > 1:
            return None
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = (torch.cat([request[i] for request in self._dense]) for i in range(3))
        q_len, kv_len = q.shape[2], k.shape[2]
        first = kv_len - q_len
        mask = None
        if q_len > 1:
            mask = create_block_mask(lambda b, h, i, j: j <= first + i, None, None, q_len, kv_len, device="cpu")
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)

    def write_tokens(self) -> None:
        """Writes the step's own tokens again, all but the cache: they come from the projections just before."""
        for tensor in (self.q, self.k, self.v):
            tensor.mul_(1)
        for q, *_ in self.__dict__.get("_dense", ()):
            q.mul_(1)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k_pages.shape[2]

    @property
    def scale(self) -> float:
        return self.shape.qk_dim**-0.5

    @cached_property
    def _dense(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Per request q, k and v ``[1, heads, tokens, dim]``, gathered from the pages, and the mask if it is needed."""
        requests, first = [], 0
        for r, (q_len, kv_len) in enumerate(zip(self.batch.q_lens, self.batch.kv_lens, strict=True)):
            table = self.metadata.page_table[r, : -(-kv_len // self.page_size)].long()
            k, v = (x[table].transpose(0, 1).flatten(1, 2)[None, :, :kv_len] for x in (self.k_pages, self.v_pages))
            q = self.q[None, first : first + q_len].transpose(1, 2).contiguous()
            mask = None
            if 1 < q_len < kv_len:  # is_causal would align the mask top left
                mask = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
            requests.append((q, k.contiguous(), v.contiguous(), mask))
            first += q_len
        return requests
