"""A model whose next token is a hash of all it can see, so that no mistake of the runtime stays hidden.

It has a paged cache like a real one. For each token it writes token and position at the token's slot; for
each wanted row it reads the request's history back through the page table. A wrong page, slot, position,
length or row changes the hash and thus the output, or is a broken history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch

from chunkc.config import GenerationDefaults, SamplingParams
from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.machine import CORES
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.request import Request
from chunkc.runtime.sampling import Sampler

GARBAGE = -(2**40)
VOCAB = 97


@lru_cache(maxsize=200_000)
def _logits(history: bytes) -> np.ndarray:
    seed = np.frombuffer(history, dtype=np.int64)
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(np.abs(seed)))).normal(size=VOCAB)


def toy_logits(tokens: Sequence[int]) -> torch.Tensor:
    """float32 [VOCAB], what the toy model says after these tokens."""
    codes = np.asarray(tokens, dtype=np.int64) << 20 | np.arange(len(tokens))
    return torch.from_numpy(_logits(codes.tobytes())).float()


def toy_generate(
    prompt: Sequence[int], params: SamplingParams, defaults: GenerationDefaults | None = None
) -> list[int]:
    """The tokens of a request that has the toy model to itself."""
    sampling = params.resolve(defaults)
    request = Request.create("alone", 0, np.asarray(prompt), sampling, RequestMetrics(0.0))
    while not request.is_full:
        logits = toy_logits(request.tokens[: request.num_tokens])
        token = Sampler().sample(logits[None], [request]).token_ids[0]
        request.append(token)
        if token in sampling.eos_token_ids:
            break
    return request.generated_token_ids()


class ToyRunner:
    """A ``ModelRunner`` of three layers, each with a cache of its own.

    Every layer writes token and position and reads each row's history back, which must be complete and in order;
    so a layer that runs too early, a page that was given away meanwhile, or a part left out is found where it
    happens. The logits come from what the last layer read.

    Attributes:
        batches: all batches so far, by the time they started.
        before: called with each batch first; may raise.
        before_part: called with batch and part before each part; may raise.
        after: called with the logits and the batch; may change the logits.
    """

    vocab_size = VOCAB
    num_parts = 3
    bytes_per_token = 8
    machine = CORES

    def __init__(self, num_pages: int = 64, page_size: int = 4, max_positions: int = 4096) -> None:
        self.num_pages, self.page_size, self.max_positions = num_pages, page_size, max_positions
        self.slots = np.full((self.num_parts, num_pages * page_size), GARBAGE, dtype=np.int64)
        self.batches: list[PackedBatch] = []
        self.before: Callable[[PackedBatch], None] = lambda batch: None
        self.before_part: Callable[[PackedBatch, int], None] = lambda batch, part: None
        self.after: Callable[[torch.Tensor, PackedBatch], None] = lambda logits, batch: None

    def run(self, batch: PackedBatch) -> torch.Tensor:
        forward = self.start(batch)
        while forward.next_part < forward.num_parts:
            forward.advance()
        return forward.logits()

    def start(self, batch: PackedBatch) -> ToyForward:
        self.before(batch)
        self._check(batch)
        self.batches.append(batch)
        return ToyForward(self, batch)

    def row_costs(self, positions: np.ndarray) -> np.ndarray:
        return 1 + 0.25 * positions

    def with_pages(self, num_pages: int) -> ToyRunner:
        return ToyRunner(num_pages, self.page_size, self.max_positions)

    def _check(self, batch: PackedBatch) -> None:
        """What the metadata promises, whatever is in the cache."""
        meta = batch.attention
        offsets = meta.q_offsets
        assert (meta.q_offsets.dtype, meta.kv_lens.dtype, meta.page_table.dtype) == (torch.int32,) * 3
        for tensor in (batch.input_ids, batch.positions, batch.logits_rows, meta.slot_mapping):
            assert tensor.dtype == torch.int64 and tensor.dim() == 1
        assert batch.num_tokens >= 1 and len(batch.logits_rows) >= 1
        assert offsets[0] == 0 and offsets[-1] == batch.num_tokens
        assert (offsets.diff() >= 1).all(), "a request without a token"
        assert (batch.logits_rows.diff() > 0).all()
        assert meta.slot_mapping.unique().numel() == batch.num_tokens, "two tokens in one slot"
        assert meta.slot_mapping.min() >= 0 and meta.slot_mapping.max() < self.slots.shape[1]
        assert meta.page_table.min() >= 0 and meta.page_table.max() < self.num_pages
        assert (batch.positions < self.max_positions).all()
        used = [meta.page_table[r, : -(-int(n) // self.page_size)].tolist() for r, n in enumerate(meta.kv_lens)]
        flat = [page for pages in used for page in pages]
        assert len(flat) == len(set(flat)), "two requests share a page"


class ToyForward:
    """A ``Forward`` of the toy."""

    def __init__(self, runner: ToyRunner, batch: PackedBatch) -> None:
        self.num_parts, self.next_part = runner.num_parts, 0
        self._runner, self._batch = runner, batch

    def advance(self) -> None:
        runner, batch, meta = self._runner, self._batch, self._batch.attention
        runner.before_part(batch, self.next_part)
        layer = runner.slots[self.next_part]
        layer[meta.slot_mapping.numpy()] = batch.input_ids.numpy() << 20 | batch.positions.numpy()
        offsets, lens, table = meta.q_offsets.numpy(), meta.kv_lens.numpy(), meta.page_table.numpy()
        size = runner.page_size
        histories = []
        for request, kv_len in enumerate(lens.tolist()):
            slots = (table[request, : -(-kv_len // size), None] * size + np.arange(size)).reshape(-1)[:kv_len]
            history = layer[slots]
            assert (history >= 0).all() and (history & (1 << 20) - 1 == np.arange(kv_len)).all(), "a broken history"
            histories.append(history)
        self.next_part += 1
        if self.next_part == self.num_parts:
            rows = []
            for row in batch.logits_rows.tolist():
                request = int(np.searchsorted(offsets, row, side="right")) - 1
                visible = int(lens[request]) - (int(offsets[request + 1]) - 1 - row)
                rows.append(torch.from_numpy(_logits(histories[request][:visible].tobytes())).float())
            self._logits = torch.stack(rows)
            runner.after(self._logits, batch)

    def logits(self) -> torch.Tensor:
        return self._logits
