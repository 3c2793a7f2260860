"""The check at compile: the compiled graph, in mixed batches, against the untouched model.

The model's own logits of four random prompts are computed first, since its weights are let go of where nobody else
needs them. Then the prompts run through the runner in uneven chunks, mixed with each other's decodes, on scattered
pages, and the logits of every token are compared. A difference beyond rounding is an error that names the first module
whose output differs, and no engine is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from chunkc.capture import logits_of
from chunkc.errors import UnsupportedModelError, VerificationError
from chunkc.kernels.metadata import AttentionMetadata
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import module_path
from chunkc.passes.page_attention import AttentionLayer
from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.runner import ModelRunner

#: largest error of a row of logits, as a fraction of that row's spread, by dtype: what rounding explains
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
#: fraction of rows that must keep within it; in half precision a near tie may route a token to another expert
_ROWS_WITHIN = {torch.float32: 1.0, torch.float16: 0.9, torch.bfloat16: 0.9}
#: rows of logits that are compared at a time: they may be large, and are made double
_ROWS_AT_A_TIME = 4
#: longest prompt of the probe: windows and chunks larger than this are left to the kernels' own tests
_LONGEST_PROBE = 640


@dataclass(frozen=True)
class Verification:
    """What the check found.

    Attributes:
        worst: largest error of a row of logits, relative to the row's spread.
        rows: how many rows were compared.
        tolerance: what was allowed.
        rows_within: fraction of the rows that had to keep within it.
    """

    worst: float
    rows: int
    tolerance: float
    rows_within: float


def probe_lengths(layers: Sequence[AttentionLayer], max_positions: int) -> list[int]:
    """Lengths of the probe's prompts, in tokens: the first reaches past windows and chunks where it can."""
    sizes = [size for layer in layers for size in (layer.shape.window, layer.shape.chunk) if size]
    reach = max([size for size in sizes if size + 16 <= _LONGEST_PROBE], default=0)
    return [min(max_positions, n) for n in (max(61, reach + 16), 24, 9, 1)]  # odd, even and one


@dataclass(frozen=True)
class Expected:
    """What the model makes of the probe.

    Attributes:
        prompts: int64 [S].
        logits: [S, V] for each.
    """

    prompts: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]


def expect(model: nn.Module, layers: Sequence[AttentionLayer], vocab_size: int, longest: int) -> Expected:
    """What the untouched model makes of the probe.

    Args:
        model: in evaluation mode and in the dtype that is to be served.
        layers: the graph's attention calls.
        vocab_size: token ids are below it.
        longest: sequence that may be served, in tokens.

    Raises:
        UnsupportedModelError: the model's own logits are not finite.
    """
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab_size, (n,), generator=generator) for n in probe_lengths(layers, longest)]
    logits = []
    with torch.no_grad():
        for prompt in prompts:
            logits.append(logits_of(model, prompt[None], torch.arange(len(prompt))[None])[0])
            if not logits[-1].isfinite().all():
                raise UnsupportedModelError(
                    "the model's own logits are not finite", hint="Look for NaN or infinity in its weights."
                )
    return Expected(tuple(prompts), tuple(logits))


def verify(
    runner: ModelRunner, expected: Expected, find_module: Callable[[torch.Tensor, float], str | None]
) -> Verification:
    """Compare the runner's logits with the model's.

    Args:
        runner: its pages are written to; must have room for the probe.
        expected: what the model makes of the probe.
        find_module: names, for a prompt with a wrong result and the tolerance, the module where the difference starts.

    Raises:
        VerificationError: the logits differ by more than rounding.
    """
    errors = [torch.full((len(prompt),), float("nan"), dtype=torch.double) for prompt in expected.prompts]
    for request, start, end, logits in _run_mixed(runner, expected.prompts):
        errors[request][start:end] = _row_errors(logits, expected.logits[request][start:end])
    dtype = expected.logits[0].dtype
    rows = torch.cat(errors)
    tolerance = TOLERANCE[dtype]
    within = (rows <= tolerance).double().mean()  # NaN is not within
    if within < _ROWS_WITHIN[dtype]:
        first = next(i for i, error in enumerate(errors) if not bool((error <= tolerance).all()))
        raise VerificationError(
            f"the compiled graph's logits differ from the model's (row error {float(rows.max()):.2g} of the logits' "
            f"spread, {tolerance:.2g} allowed, {float(within):.0%} of rows within)",
            op="logits",
            module=find_module(expected.prompts[first], tolerance),
            hint="Please report it with the model's configuration. verify='off' would serve these wrong logits.",
        )
    return Verification(float(rows.max()), len(rows), tolerance, _ROWS_WITHIN[dtype])


def _row_errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Root mean square difference of each row over the row's standard deviation. [S, V] twice -> [S]."""
    errors = []
    for ours, theirs in zip(logits.split(_ROWS_AT_A_TIME), expected.split(_ROWS_AT_A_TIME), strict=True):
        theirs = theirs.double()
        difference = theirs - ours
        errors.append(difference.pow_(2).mean(dim=-1).sqrt() / theirs.std(dim=-1).clamp_min(1e-6))
    return torch.cat(errors)


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


def _run_mixed(runner: ModelRunner, prompts: Sequence[torch.Tensor]) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """(request, start, end, logits of the tokens in between) of every prompt, computed in mixed batches."""
    size = runner.page_size
    lengths = [len(prompt) for prompt in prompts]
    counts = [-(-length // size) for length in lengths]
    scattered = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).int()
    tables = scattered.split(counts)
    for chunks in _schedule(lengths):
        logits = runner.run(_pack(chunks, prompts, tables, size))
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


class _LayerOutputs(fx.Interpreter):
    """Keeps, for every module, the last value computed in it or in a module below it."""

    outputs: dict[str, torch.Tensor]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        type(self).outputs = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function" and isinstance(result, torch.Tensor) and result.is_floating_point():
            parts = module_path(n).split(".")
            for count in range(1, len(parts) + 1):
                type(self).outputs[".".join(parts[:count])] = result
        return result


def first_difference(
    graph_module: fx.GraphModule, reference: nn.Module, prompt: torch.Tensor, tolerance: float
) -> str | None:
    """Path of the first module, in execution order, whose output differs; None where only batching does it.

    Args:
        graph_module: the graph before compilation, over its weights.
        reference: the untouched model.
        prompt: int64 [S].
        tolerance: error of a row, relative to its spread, that is no difference.
    """
    expected: dict[str, list[torch.Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            tensors = [o for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()]
            # a copy, since what follows may add to it in place
            expected[path] = [tensor.detach().clone().reshape(-1, tensor.shape[-1]) for tensor in tensors]

        return hook

    hooks = [module.register_forward_hook(keep(path)) for path, module in reference.named_modules() if path]
    try:
        with torch.no_grad():
            logits_of(reference, prompt[None], torch.arange(len(prompt))[None])
            run_on_prompt(graph_module, prompt, interpreter=_LayerOutputs)
    finally:
        for hook in hooks:
            hook.remove()
    for path, outputs in expected.items():
        ours = _LayerOutputs.outputs.get(path)
        if ours is None:
            continue
        # the last value computed in a module may be any of its outputs (a rotary embedding's sine)
        errors = [_row_errors(ours.reshape(o.shape), o) for o in outputs if o.numel() == ours.numel()]
        if errors and not any(bool((error <= tolerance).all()) for error in errors):
            return path
    return None
