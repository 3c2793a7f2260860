"""The probe: random prompts that run through a runner in uneven chunks, mixed with each other's decodes, on scattered
pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from chunkc.errors import VerificationError
from chunkc.kernels.metadata import AttentionMetadata
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.deferred_logits import DeferredLogits, rows_of
from chunkc.runtime.runner import ModelRunner

#: longest prompt of the probe: windows and chunks larger than this are left to the kernels' own tests
_LONGEST_PROBE = 640


def probe_prompts(layers: Sequence[AttentionLayer], vocab_size: int, longest: int) -> tuple[torch.Tensor, ...]:
    """The prompts, int64 [S] each, the same every time.

    Args:
        layers: the graph's attention calls.
        vocab_size: token ids are below it.
        longest: sequence that may be served, in tokens.
    """
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(vocab_size, (n,), generator=generator) for n in _lengths(layers, longest))


def _lengths(layers: Sequence[AttentionLayer], max_positions: int) -> list[int]:
    """Lengths of the probe's prompts, in tokens: the first reaches past windows and chunks where it can."""
    sizes = [size for layer in layers for size in (layer.shape.window, layer.shape.chunk) if size]
    reach = max([size for size in sizes if size + 16 <= _LONGEST_PROBE], default=0)
    return [min(max_positions, n) for n in (max(61, reach + 16), 24, 9, 1)]  # odd, even and one


def probe_pages(lengths: Sequence[int], page_size: int) -> int:
    """Pages that the probe needs."""
    return sum(-(-length // page_size) for length in lengths)


def _schedule(lengths: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Steps of (request, start, end): uneven chunks, single tokens, and requests at different places."""
    cuts = [7, 1, 19, 1, 2]
    done = [0] * len(lengths)
    step = 0
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        chunks = []
        for request, length in enumerate(lengths):
            if step < request or done[request] == length:  # requests join one after the other
                continue
            count = min(cuts[(step + 2 * request) % len(cuts)], length - done[request])
            if step > 8:  # the rest of a long prompt in two pieces, the second of one token
                count = max(1, length - done[request] - 1)
            chunks.append((request, done[request], done[request] + count))
            done[request] += count
        yield chunks
        step += 1


def run_mixed(runner: ModelRunner, prompts: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """(request, start, end, logits of the tokens in between) of every prompt, computed in mixed batches.

    Raises:
        VerificationError: the best tokens that the head gives by themselves are not those of its logits.
    """
    size = runner.page_size
    lengths = [len(prompt) for prompt in prompts]
    counts = [-(-length // size) for length in lengths]
    scattered = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
    tables = scattered.split(counts)
    for chunks in _schedule(lengths):
        result = runner.run(_pack(chunks, prompts, tables, size))
        logits = rows_of(result)
        if isinstance(result, DeferredLogits) and (result.best()[0].numpy() != logits.numpy().argmax(-1)).any():
            raise VerificationError(
                "the best tokens that the head gives are not those of its logits",
                op="chunkc::linear_argmax",
                hint="Please report it with the model's configuration. verify='off' would serve these wrong tokens.",
            )
        parts = logits.split([end - start for _, start, end in chunks])
        for chunk, part in zip(chunks, parts, strict=True):
            yield *chunk, part


def _pack(
    chunks: list[tuple[int, int, int]],
    prompts: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    page_size: int,
) -> PackedBatch:
    positions = torch.cat([torch.arange(start, end) for _, start, end in chunks])
    ids = torch.cat([prompts[request][start:end] for request, start, end in chunks])
    slots = torch.cat(
        [
            tables[request].long()[torch.arange(start, end) // page_size] * page_size
            + torch.arange(start, end) % page_size
            for request, start, end in chunks
        ]
    )
    width = max(len(tables[request]) for request, _, _ in chunks)
    table = torch.zeros(len(chunks), width, dtype=torch.int32)
    for row, (request, _, _) in enumerate(chunks):
        table[row, : len(tables[request])] = tables[request]
    counts = torch.tensor([0] + [end - start for _, start, end in chunks])
    metadata = AttentionMetadata(
        q_offsets=counts.cumsum(0).int(),
        kv_lens=torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
        page_table=table,
        slot_mapping=slots,
    )
    return PackedBatch(ids, positions, metadata, torch.arange(len(ids)))
