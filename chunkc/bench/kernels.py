"""``python -m chunkc.bench kernels``: the C++ attention against what the machine can do, and against torch.

In every round each limit of the machine and each case is measured once, so that whatever else the machine does falls
on all of them alike. A share is the median over the rounds of a case's rate by the limit measured in the same round.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from chunkc.bench.arguments import positive
from chunkc.bench.progress import stage
from chunkc.config import DEFAULT_PAGE_SIZE
from chunkc.errors import ChunkcError

DESCRIPTION = "the C++ attention on CPU: decode, prefill and mixed batches against the limits of the machine"

TARGETS = {"decode": ">= 80%", "prefill": ">= 60%", "mixed": "<= 1.1x"}
SHAPES = {"9/3/64": (9, 3, 64), "32/8/128": (32, 8, 128)}
_WARM_UP, _ROUNDS, _QUICK_ROUNDS = 1, 7, 3
_MOST_THREADS = 64  # of a CPU: beyond, threads cannot be made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="one shape, smaller batches, fewer rounds, no flex_attention"
    )
    parser.add_argument("--threads", nargs="+", type=positive, default=[1, 2], metavar="N", help="(default: 1 2)")
    parser.add_argument("--rounds", type=positive, metavar="N", help=f"(default: {_ROUNDS}; quick: {_QUICK_ROUNDS})")
    parser.add_argument(
        "--shape", nargs="+", choices=SHAPES, default=None, help="query heads/key-value heads/dim (default: all)"
    )
    parser.add_argument("--dtype", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument(
        "--page-size",
        type=positive,
        default=DEFAULT_PAGE_SIZE,
        metavar="N",
        help="tokens in a page of the cache (default: %(default)s)",
    )
    parser.add_argument("--small-pages", action="store_true", help="leave the cache on the system's 4 KiB pages")
    parser.add_argument("--no-torch", action="store_true", help="leave out SDPA and flex_attention")


@dataclass
class Row:
    """A case on a number of threads: what to call, and what it took, a figure per round."""

    batch: Any
    inputs: Any
    shape_name: str
    dtype: Any
    threads: int
    calls: dict[str, tuple[Any, Callable[[], object]]]  # with their inputs
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    limit: list[float] = field(default_factory=list)  # bytes or operations per second; seconds for a mixed batch
    runs: list[float] = field(default_factory=list)  # of a decode: bytes per second in runs as long as a page's

    @property
    def kind(self) -> str:
        return self.batch.name.split()[0]

    @property
    def work(self) -> int:
        """Bytes of a decode, operations of a prefill."""
        if self.kind == "decode":
            return self.batch.bytes(self.inputs.shape, self.dtype)
        return self.batch.operations(self.inputs.shape)

    def shares(self) -> list[float]:
        """Per round: the part of the limit that was reached; for a mixed batch, its time by the ideal one."""
        ours = self.seconds["ours"]
        if self.kind == "mixed":
            return [taken / ideal for taken, ideal in zip(ours, self.limit, strict=True)]
        return [self.work / taken / limit for taken, limit in zip(ours, self.limit, strict=True)]

    @property
    def run_bytes(self) -> int:
        """A page's keys of all heads, which lie in a row; in whole steps of the measurement."""
        shape = self.inputs.shape
        size = shape.num_kv_heads * self.inputs.page_size * shape.qk_dim * self.dtype.itemsize
        return max(256, size // 256 * 256)

    def ratio(self, other: str) -> float | None:
        """How many times longer another way takes."""
        if not self.seconds[other]:
            return None
        return median(theirs / ours for theirs, ours in zip(self.seconds[other], self.seconds["ours"], strict=True))


def run(args: argparse.Namespace) -> int:
    import torch
    import torch._dynamo

    from chunkc.bench.kernels_rates import MachineRates
    from chunkc.kernels import cpu_backend

    if not all(cpu_backend.load(getattr(torch, name)) for name in args.dtype):
        raise ChunkcError("the C++ attention needs a C++ compiler: install g++ or clang, or set CXX")
    before, cpus = torch.get_num_threads(), len(os.sched_getaffinity(0))
    if max(args.threads) > _MOST_THREADS * cpus:
        raise ChunkcError(f"{max(args.threads)} threads are too many for {cpus} CPUs")
    torch._dynamo.config.recompile_limit = 64  # flex_attention is compiled for each batch
    try:
        rates = MachineRates(args.quick)
        for shape_name in args.shape or (["9/3/64"] if args.quick else SHAPES):
            for dtype_name in args.dtype:
                with stage(f"{shape_name} {dtype_name}"):
                    rows = _rows_in_memory(args, shape_name, getattr(torch, dtype_name))
                    products = _measure(rows, rates, args)
                print(render(rows))
                print(_footer(rows, products, dtype_name), end="\n\n")
    finally:
        torch.set_num_threads(before)
    print(LEGEND)
    return 0


def _batches(quick: bool) -> list[Any]:
    from chunkc.bench.kernels_cases import Batch

    requests, chunk, prefixes = (8, 256, (0, 512)) if quick else (32, 512, (0, 512, 3584))
    decodes = Batch(f"decode {requests} x 2048", (1,) * requests, (2048,) * requests)
    prefills = [Batch(f"prefill {chunk} at {prefix}", (chunk,), (prefix + chunk,)) for prefix in prefixes]
    mixed = Batch(f"mixed 8 x 1024 + {chunk} at 512", (1,) * 8 + (chunk,), (1024,) * 8 + (512 + chunk,))
    return [decodes, *prefills, mixed]


def _rows(args: argparse.Namespace, shape_name: str, dtype: Any) -> Iterator[Row]:
    from chunkc.bench.kernels_cases import Batch, Inputs
    from chunkc.kernels.tasks import AttentionShape

    q_heads, kv_heads, dim = SHAPES[shape_name]
    shape = AttentionShape(q_heads, kv_heads, dim, dim)
    huge = not args.small_pages
    for batch in _batches(args.quick):
        inputs = Inputs.make(batch, shape, dtype, args.page_size, huge)
        others: dict[str, tuple[Any, Callable[[], object]]] = {}
        if not args.no_torch:
            others["SDPA"] = inputs, inputs.sdpa()
            flex = None if args.quick else _flex(inputs)
            others |= {"flex": (inputs, flex)} if flex else {}
        parts = []
        if batch.name.startswith("mixed"):  # what it would be ideal to take the sum of
            parts = [
                Inputs.make(Batch("decode", batch.q_lens[:-1], batch.kv_lens[:-1]), shape, dtype, args.page_size, huge),
                Inputs.make(
                    Batch("prefill", batch.q_lens[-1:], batch.kv_lens[-1:]), shape, dtype, args.page_size, huge
                ),
            ]
        for threads in args.threads:
            calls = {"ours": (inputs, inputs.ours(threads)), **others}
            calls |= {part.batch.name: (part, part.ours(threads)) for part in parts}
            yield Row(batch, inputs, shape_name, dtype, threads, calls)


def _rows_in_memory(args: argparse.Namespace, shape_name: str, dtype: Any) -> list[Row]:
    try:
        return list(_rows(args, shape_name, dtype))
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        raise ChunkcError(f"the cases do not fit into memory with pages of {args.page_size} tokens") from error


def _flex(inputs: Any) -> Callable[[], object] | None:
    """flex_attention, compiled; None where it does not run."""
    try:
        call = inputs.flex()
        if call is not None:
            call()
        return call
    except Exception:
        return None


def _measure(rows: list[Row], rates: Any, args: argparse.Namespace) -> dict[int, tuple[str, list[float], list[float]]]:
    """Fills the rows. Returns, per number of threads, who makes the products to compare with, and the rates in each
    round of those and of our own register tiles."""
    import torch

    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
    products: dict[int, tuple[str, list[float], list[float]]] = {}
    for number in range(rounds + _WARM_UP):
        keep = number >= _WARM_UP
        for row in rows:
            torch.set_num_threads(row.threads)
            dim = row.inputs.shape.qk_dim
            taken = {name: _seconds(inputs, call) for name, (inputs, call) in row.calls.items()}
            if row.kind == "mixed":
                limit = taken["decode"] + taken["prefill"]
            elif row.kind == "decode":
                limit = rates.read(row.threads)
                if keep:
                    row.runs.append(rates.read_runs(row.run_bytes, row.threads))
            else:
                limit, name = rates.product(row.dtype, dim, row.threads)
                entry = products.setdefault(row.threads, (name, [], []))
                entry[1].append(limit)
                entry[2].append(rates.own_product(row.dtype, dim, row.threads))
            if keep:
                row.limit.append(limit)
                for name, seconds in taken.items():
                    row.seconds[name].append(seconds)
    return products


def _seconds(inputs: Any, call: Callable[[], object]) -> float:
    inputs.write_tokens()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def render(rows: list[Row]) -> str:
    """The table, a row per case and number of threads."""
    from tabulate import tabulate

    headings = [
        "heads/dim",
        "dtype",
        "case",
        "threads",
        "ms",
        "reached",
        "limit",
        "share of\nlimit",
        "wanted",
        "SDPA\ntakes",
        "flex\ntakes",
    ]
    body = []
    for row in rows:
        taken, limit, share = median(row.seconds["ours"]), median(row.limit), median(row.shares())
        if row.kind == "mixed":
            figures = [f"{taken * 1e3:.2f} ms", f"{limit * 1e3:.2f} ms", f"{share:.2f}x"]
        else:
            unit = "GB/s" if row.kind == "decode" else "GFLOP/s"
            figures = [f"{row.work / taken / 1e9:.1f} {unit}", f"{limit / 1e9:.1f} {unit}", f"{share:.0%}"]
        ratios = ["-" if (ratio := row.ratio(other)) is None else f"{ratio:.1f}x" for other in ("SDPA", "flex")]
        name = str(row.dtype).removeprefix("torch.")
        cells = [row.shape_name, name, row.batch.name, row.threads, f"{taken * 1e3:.2f}", *figures]
        body.append([*cells, TARGETS[row.kind], *ratios])
    alignment = ("left", "left", "left", *("right" for _ in headings[3:]))
    return tabulate(body, headers=headings, colalign=alignment, disable_numparse=True, tablefmt="simple")


def _footer(rows: list[Row], products: dict[int, tuple[str, list[float], list[float]]], dtype_name: str) -> str:
    runs = [
        f"A page's keys are a run of {row.run_bytes} bytes. Such runs are read in any order, with "
        f"{_threads(row.threads)}, at {median(row.runs) / 1e9:.1f} GB/s, of which the decode reaches "
        f"{median(row.work / t / r for t, r in zip(row.seconds['ours'], row.runs, strict=True)):.0%}."
        for row in rows
        if row.runs
    ]
    return "\n".join([*runs, *_products(products, dtype_name)])


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _products(products: dict[int, tuple[str, list[float], list[float]]], dtype_name: str) -> list[str]:
    return [
        f"Products of 64 rows in {dtype_name}, {_threads(threads)}: "
        f"{name} {median(theirs) / 1e9:.0f} GFLOP/s, our register tiles {median(own) / 1e9:.0f} GFLOP/s."
        for threads, (name, theirs, own) in products.items()
    ]


LEGEND = """\
Medians over the rounds. The limit of a decode is the rate at which memory is read in order, that of a prefill the rate
of products of 64 rows in the cache (in the dtype of the inputs), and that of a mixed batch the time that its decodes
and its chunk take one after the other. Reached: keys and values read once, operations of visible pairs. SDPA and flex:
how many times longer torch takes, with keys and values in one piece; SDPA is called per request. The step's own
queries, keys and values were written just before, as by a layer's projections, and SDPA's queries; the cache was not
touched. Memory lies on huge pages where the system grants them (but for the cache with --small-pages)."""
