"""``python -m chunkc.bench multiplex``: what prompts cost the decodes beside them, in every mode.

Some requests decode all the time, and as soon as a prompt is done there is the next. A row is one mode with one
budget and gives a point: inter-token latency of the decodes against prefilled tokens per second. The rows take turns,
round by round; the figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from chunkc.bench import multiplex_plot
from chunkc.bench.arguments import budget, positive
from chunkc.bench.files import opened
from chunkc.bench.multiplex_run import Load, Point, measure, needed_tokens
from chunkc.bench.progress import stage
from chunkc.bench.quiet import wait_until_quiet
from chunkc.errors import ChunkcError
from chunkc.models import DEFAULT_MODEL, DTYPES, load

DESCRIPTION = "prefill throughput against decode latency: in one batch, by layers, and side by side"
ALONE = "decode alone"
_STEPS = 1500  # the decodes' tokens: more than any row needs with the default arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="(default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES, help="(default: %(default)s)")
    parser.add_argument("--decodes", type=positive, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--context",
        type=positive,
        default=64,
        metavar="N",
        help="tokens of a decode at its start (default: %(default)s)",
    )
    parser.add_argument(
        "--prompt", type=positive, default=1024, metavar="N", help="tokens of a prompt (default: %(default)s)"
    )
    parser.add_argument("--prompts", type=positive, default=4, metavar="N", help="in a run (default: %(default)s)")
    parser.add_argument(
        "--budget",
        nargs="+",
        type=budget,
        default=[24, 40, 72, 136, 520, None],
        metavar="N",
        help="budgets of the one batch, 'whole' for whole prompts (default: 24 40 72 136 520 whole)",
    )
    parser.add_argument(
        "--layers", nargs="*", type=positive, default=[24, 40, 72, 136, 520], metavar="N",
        help="budgets of the mode 'layers' (default: 24 40 72 136 520)",
    )  # fmt: skip
    parser.add_argument(
        "--streams", nargs="*", type=positive, default=[128, 512], metavar="N",
        help="budgets of the mode 'streams' (default: 128 512)",
    )  # fmt: skip
    parser.add_argument("--decode-cores", type=positive, metavar="N", help="in 'streams' (default: as measured)")
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--quiet", type=float, default=0, metavar="S", help="longest wait for a quiet machine before a row (default: 0)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the points (.svg, .png, .pdf; needs matplotlib)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures, a line each")


@dataclass
class Row:
    """A mode with a budget, and what was measured."""

    name: str
    mode: str
    budget: int | None
    points: list[Point] = field(default_factory=list)

    def median(self, figure: str) -> float | None:
        """Over the rounds."""
        values = [getattr(point, figure) for point in self.points]
        return None if any(value is None for value in values) else statistics.median(values)


def run(args: argparse.Namespace) -> int:
    if args.plot:
        multiplex_plot.check(args.plot)
    wanted = Load(args.decodes, args.context, args.prompt, args.prompts)
    engine = _compile(args, wanted)
    rows = [Row(ALONE, "off", None)]
    rows += [Row("whole" if size is None else f"one batch, {size}", "off", size) for size in args.budget]
    rows += [Row(f"layers, {size}", "layers", size) for size in args.layers]
    rows += [Row(f"streams, {size}", "streams", size) for size in args.streams]
    with opened(args.json) as record:
        with stage("Warming up"):
            for row in rows:
                _measure(engine, row, replace(wanted, prompts=1))
        for number in range(args.rounds):
            for row in rows:
                noise = wait_until_quiet(args.quiet) if args.quiet else None
                with stage(f"Round {number + 1} of {args.rounds}: {row.name}{'' if noise is None else f' ({noise})'}"):
                    point = _measure(engine, row, wanted)
                row.points.append(point)
                if record:
                    figures = {"row": row.name, "mode": row.mode, "budget": row.budget, "round": number}
                    print(json.dumps({**figures, "dtype": args.dtype, **asdict(point)}), file=record, flush=True)
    print(f"\n{args.model}, {args.dtype}: {wanted.decodes} decodes from {wanted.context} tokens on, {wanted.prompts} "
          f"prompts of {wanted.prompt} tokens one after the other")  # fmt: skip
    print(report(rows))
    print("\n".join(compare(rows)))
    if engine.contention is not None:
        print(f"\n{engine.contention}")
    if args.plot:
        multiplex_plot.draw(rows, args.plot, f"{args.model}, {args.dtype}, prompts of {wanted.prompt} tokens")
    return 0


def _compile(args: argparse.Namespace, wanted: Load) -> Any:
    import chunkc
    from chunkc.config import DEFAULT_PAGE_SIZE

    with stage(f"Loading and compiling {args.model} in {args.dtype}"):
        model, _ = load(args.model, dtype=args.dtype)
        pages = needed_tokens(wanted, _STEPS) // DEFAULT_PAGE_SIZE + wanted.decodes + 3  # two prompts at a time
        engine = chunkc.compile(model, num_pages=pages)
    if args.streams:
        with stage("Measuring contention"):
            try:
                engine.calibrate()
                engine.decode_cores = args.decode_cores
            except ValueError as error:
                raise ChunkcError(f"{error} (--streams without a number leaves that mode out)") from error
    return engine


def _measure(engine: Any, row: Row, wanted: Load) -> Point:
    engine.budget, engine.multiplex = row.budget, row.mode
    if row.name == ALONE:
        return measure(engine, replace(wanted, prompts=0), steps=120)
    return measure(engine, wanted, steps=_STEPS)


def report(rows: Sequence[Row]) -> str:
    """The table."""
    from tabulate import tabulate

    alone = next((row.median("itl_p99_ms") for row in rows if row.name == ALONE), None)
    cells = []
    for row in rows:
        p99 = row.median("itl_p99_ms")
        cells.append(
            [
                row.name,
                _cell(row.median("itl_p50_ms"), ".1f"),
                _cell(p99, ".1f"),
                _cell(row.median("itl_max_ms"), ".1f"),
                _cell(p99 / alone if p99 and alone else None, ".2f"),
                _cell(row.median("prefill_tok_s"), ".0f"),
                _cell(row.median("read_again_mb"), ".1f"),
            ]
        )
    headers = [
        "",
        "decode ITL\np50 ms",
        "p99 ms",
        "max ms",
        "p99 / alone",
        "prefill\ntok/s",
        "K, V read again\nMB a prompt",
    ]
    return tabulate(cells, headers, disable_numparse=True, colalign=("left", *["right"] * 6))


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def compare(rows: Sequence[Row]) -> list[str]:
    """For each row that is not one batch: its prefill throughput against that of one batch with the same decode ITL
    p99, between whose budgets it is interpolated."""
    batch = sorted(
        (row.median("itl_p99_ms"), row.median("prefill_tok_s"))
        for row in rows
        if row.mode == "off" and row.name != ALONE
    )
    lines = []
    for row in rows:
        if row.mode == "off":
            continue
        p99, rate = row.median("itl_p99_ms"), row.median("prefill_tok_s")
        there = at_latency(batch, p99)
        if there is None:
            lines.append(f"{row.name}: {rate:.0f} tok/s at a p99 of {p99:.1f} ms; one batch has no budget that fast")
        else:
            ratio = f"one batch {there:.0f}: a ratio of {rate / there:.2f}"
            lines.append(f"{row.name}: {rate:.0f} tok/s at a p99 of {p99:.1f} ms, {ratio}")
    return lines


def at_latency(points: Sequence[tuple[float, float]], latency: float) -> float | None:
    """The throughput at a latency, of a curve through (latency, throughput), ascending: the best of all points that
    are as fast, and of the line to the next one; None where all are slower."""
    below = [point for point in points if point[0] <= latency]
    if not below:
        return None
    best = max(rate for _, rate in below)
    above = [point for point in points if point[0] > latency]
    if above:
        (x0, y0), (x1, y1) = below[-1], above[0]
        best = max(best, y0 + (y1 - y0) * (latency - x0) / (x1 - x0))
    return best
