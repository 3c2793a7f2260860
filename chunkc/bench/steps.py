"""``python -m chunkc.bench steps``: a decode step and a prefill step against what the machine can do.

A decode step has to read every weight once; the limit is what it takes to read as many bytes in order. A prefill step
has to do the linears' and the attention's products; the limit is the rate of products of 64 rows in the cache. Steps
and limits are measured in turns. A third row says how much of a decode step with many requests is not the model:
scheduling, packing, sampling and bookkeeping.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from chunkc.bench.arguments import positive
from chunkc.bench.progress import stage
from chunkc.bench.quiet import wait_until_quiet
from chunkc.models import DEFAULT_MODEL, DTYPES, load

DESCRIPTION = "a decode step and a prefill step on the CPU against the limits of the machine"
_PRODUCT_DIMS = (64, 128, 256, 512)  # the fastest counts
_STEPS = 20  # of a decode row, a round


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"], help="(default: both)")
    parser.add_argument("--decodes", type=positive, default=8, metavar="N", help="running (default: %(default)s)")
    parser.add_argument(
        "--many", type=positive, default=64, metavar="N", help="in the third row (default: %(default)s)"
    )
    parser.add_argument("--context", type=positive, default=128, metavar="N", help="of each (default: %(default)s)")
    parser.add_argument("--prompt", type=positive, default=512, metavar="N", help="tokens (default: %(default)s)")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--quiet", type=float, default=0, metavar="S", help="longest wait for a quiet machine (default: 0)"
    )


@dataclass
class Measured:
    """Figures of the rounds: seconds, bytes per second, operations per second, and a share."""

    decode: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    product: list[float] = field(default_factory=list)
    outside: list[float] = field(default_factory=list)


def run(args: argparse.Namespace) -> int:
    from tabulate import tabulate

    body = []
    for dtype in args.dtype:
        body += _rows(args, dtype)
    headings = ["dtype", "step", "ms", "limit", "limit ms", "step / limit", "wanted"]
    print(tabulate(body, headings, disable_numparse=True, colalign=("left", "left", *["right"] * 5)))
    print("Medians over the rounds; a ratio is of a step and the limit measured next to it.")
    return 0


def _rows(args: argparse.Namespace, dtype: str) -> list[list[str]]:
    import torch

    import chunkc
    from chunkc.bench.kernels_rates import MachineRates
    from chunkc.config import DEFAULT_PAGE_SIZE

    with stage(f"Loading and compiling {args.model} in {dtype}"):
        model, _ = load(args.model, dtype=dtype)
        requests = max(args.decodes, args.many)
        tokens = requests * (args.context + _STEPS + 4) + args.prompt + 2
        engine = chunkc.compile(
            model, budget=None, num_pages=tokens // DEFAULT_PAGE_SIZE + requests + 1, max_requests=requests + 1
        )
        rates = MachineRates(quick=False)
    if args.quiet:
        wait_until_quiet(args.quiet)
    with stage(f"Measuring {args.rounds} rounds"):
        threads, kind = torch.get_num_threads(), getattr(torch, dtype)
        measured = Measured()
        for _ in range(args.rounds):
            measured.read.append(rates.read(threads))
            measured.decode.append(_decode(engine, args.decodes, args.context)[0])
            measured.product.append(max(rates.product(kind, dim, threads)[0] for dim in _PRODUCT_DIMS))
            measured.prefill.append(_prefill(engine, args.prompt))
            measured.outside.append(_decode(engine, args.many, args.context)[1])
    weights = weight_bytes(model)
    operations = 2 * linear_weights(model) * args.prompt + _attention_operations(engine, args.prompt)
    read = [weights / rate for rate in measured.read]
    products = [operations / rate for rate in measured.product]
    bandwidth, rate = f"{median(measured.read) / 1e9:.1f} GB/s", f"{median(measured.product) / 1e9:.0f} GFLOP/s"
    outside = f"{median(measured.outside):.1%}"
    return [
        _row(dtype, f"decode, {args.decodes} at {args.context}", measured.decode, bandwidth, read, "<= 1.50"),
        _row(dtype, f"prefill, {args.prompt} tokens", measured.prefill, rate, products, "<= 1.33"),
        [dtype, f"outside the graph, {args.many} decodes", "-", "-", "-", outside, "< 5%"],
    ]


def _row(dtype: str, name: str, taken: Sequence[float], rate: str, limit: Sequence[float], wanted: str) -> list[str]:
    ratio = median(a / b for a, b in zip(taken, limit, strict=True))
    return [dtype, name, f"{median(taken) * 1e3:.1f}", rate, f"{median(limit) * 1e3:.1f}", f"{ratio:.2f}", wanted]


def weight_bytes(model: Any) -> int:
    """Bytes of the weights that a step reads: all, but for an embedding that is not the head as well."""
    return sum(parameter.nbytes for name, parameter in _read(model))


def linear_weights(model: Any) -> int:
    """Weights that every token is multiplied with: matrices, without embedding and head."""
    head = model.get_output_embeddings()
    return sum(p.numel() for name, p in _read(model) if p.dim() == 2 and (head is None or p is not head.weight))


def _read(model: Any) -> list[tuple[str, Any]]:
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return [(name, p) for name, p in model.named_parameters() if p is not embedding or (head and p is head.weight)]


def _attention_operations(engine: Any, tokens: int) -> float:
    import numpy as np

    costs = engine.runner.row_costs(np.arange(tokens)) - 1
    return float(costs.sum()) * engine.runner.linear_operations


def _decode(engine: Any, count: int, context: int) -> tuple[float, float]:
    """(seconds of a decode step, share of it outside of the model), medians."""
    steps: list[Any] = []

    def work(names: list[str]) -> None:
        engine.step()  # the prompts
        engine.step()
        engine.reset_metrics()
        for _ in range(_STEPS):
            engine.step()
        steps.extend(engine.metrics.records)

    _with_requests(engine, count, context, _STEPS + 4, work)
    return median(r.total_s for r in steps), median(r.overhead_s / r.total_s for r in steps)


def _prefill(engine: Any, tokens: int) -> float:
    taken: list[float] = []

    def work(names: list[str]) -> None:
        engine.reset_metrics()
        engine.step()
        taken.append(engine.metrics.records[-1].total_s)

    for _ in range(3):
        _with_requests(engine, 1, tokens, 2, work)
    return median(taken)


def _with_requests(engine: Any, count: int, length: int, new: int, work: Callable[[list[str]], None]) -> None:
    from chunkc import SamplingParams

    vocab = engine.runner.vocab_size
    prompts = [[(number * 131 + position * 7919) % vocab for position in range(length)] for number in range(count)]
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    names = [engine.add_request(prompt, params) for prompt in prompts]
    try:
        work(names)
    finally:
        for name in names:
            engine.abort(name)
