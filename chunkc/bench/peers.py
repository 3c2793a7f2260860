"""``python -m chunkc.bench peers``: ours against other engines, in alternation, on one workload file.

A peer is any command that prints, for every workload, a line ``RESULT {json}`` with the figures of this benchmark
(``workload``, ``dtype``, ``wall_s``, ``dec_itl_p99_ms``, ``long_ttft_p50_ms``; others are ignored). It is run with
``--workload FILE --which A,B --dtype D --chunk BUDGET --repeat 1`` behind what is given. Peers are no dependencies.

Rounds alternate: each contestant is run once a round, in a process of its own, when the machine is quiet, and the
order turns around from round to round. A ratio is the peer's figure over ours in the same round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from chunkc.bench.progress import stage
from chunkc.bench.quiet import wait_until_quiet
from chunkc.bench.workload import load_workloads
from chunkc.config import MULTIPLEX
from chunkc.errors import ChunkcError
from chunkc.models import DEFAULT_MODEL, DTYPES

DESCRIPTION = "serve a workload with chunkc and with other engines in alternation, and print the ratios"
OURS = "chunkc"
#: figures that are compared, all the smaller the better, and what they are called in the table
FIGURES = {"wall_s": "wall s", "dec_itl_p99_ms": "decode ITL p99 ms", "long_ttft_p50_ms": "long TTFT p50 ms"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", type=Path, required=True, metavar="FILE", help="JSON file of named workloads")
    parser.add_argument("--which", nargs="+", metavar="NAME", help="workloads to take from it (default: all)")
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        type=_peer,
        metavar="NAME=COMMAND",
        help="another engine's driver; may be given several times",
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what chunkc loads (default: %(default)s)")
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=DTYPES, help="(default: float32)")
    parser.add_argument("--budget", type=int, default=512, metavar="N", help="token budget (default: %(default)s)")
    parser.add_argument("--multiplex", default="off", choices=MULTIPLEX, help="ours only (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--quiet", type=float, default=240, metavar="S", help="longest wait for a quiet machine (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every run's figures, a line each")


def _peer(text: str) -> tuple[str, list[str]]:
    name, equals, command = text.partition("=")
    if not equals or not name or not command.strip() or name == OURS:
        raise argparse.ArgumentTypeError(f"must be NAME=COMMAND, with a name other than {OURS}, not {text!r}")
    return name, shlex.split(command)


@dataclass(frozen=True)
class Run:
    """One contestant's figures on one workload in one round."""

    name: str
    dtype: str
    workload: str
    round: int
    figures: dict[str, float]


def run(args: argparse.Namespace) -> int:
    names = [workload.name for workload in load_workloads(args.workload, args.which)]
    runs: list[Run] = []
    for dtype in args.dtype:
        for number in range(args.rounds):
            contestants = [(OURS, None), *args.peer]
            for name, command in contestants if number % 2 == 0 else reversed(contestants):
                noise = wait_until_quiet(args.quiet)
                with stage(f"{dtype}, round {number + 1}: {name}{'' if noise is None else f' ({noise})'}"):
                    found = _ours(args, names, dtype) if command is None else _theirs(args, names, dtype, command)
                runs += [Run(name, dtype, workload, number, figures) for workload, figures in found]
    if args.json:
        args.json.write_text("".join(json.dumps(vars(one)) + "\n" for one in runs))
    print(report(runs))
    return 0


def _ours(args: argparse.Namespace, names: Sequence[str], dtype: str) -> Iterator[tuple[str, dict[str, float]]]:
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        command = [sys.executable, "-m", "chunkc.bench", "serve", "--model", args.model, "--dtype", dtype]
        command += ["--workload", str(args.workload), "--which", *names, "--budget", str(args.budget)]
        command += ["--multiplex", args.multiplex]
        _output(OURS, [*command, "--repeat", "1", "--no-hf", "--json", str(results)])
        found = [json.loads(line) for line in results.read_text().splitlines()]
    return iter([(result["workload"], _figures(result)) for result in found])


def _theirs(
    args: argparse.Namespace, names: Sequence[str], dtype: str, command: Sequence[str]
) -> Iterator[tuple[str, dict[str, float]]]:
    options = ["--workload", str(args.workload), "--which", ",".join(names), "--dtype", dtype]
    output = _output(command[0], [*command, *options, "--chunk", str(args.budget), "--repeat", "1"])
    lines = [line.removeprefix("RESULT ") for line in output.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise ChunkcError(f"{shlex.join(command)} printed no RESULT line")
    return iter([(result["workload"], _figures(result)) for result in map(json.loads, lines)])


def _output(name: str, command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ChunkcError(f"{name} failed ({done.returncode}): {shlex.join(command)}\n{done.stderr[-3000:]}")
    return done.stdout


def _figures(result: dict[str, Any]) -> dict[str, float]:
    return {name: float(result[name]) for name in FIGURES if result.get(name) is not None}


def report(runs: Sequence[Run]) -> str:
    """A table: medians, and how often longer a peer takes than ours, with the smallest and largest of all rounds."""
    ours = {(one.dtype, one.workload, one.round): one.figures for one in runs if one.name == OURS}
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for one in runs:
        groups.setdefault((one.dtype, one.workload, one.name), []).append(one)
    rows = []
    for (dtype, workload, name), same in groups.items():
        row = [dtype, workload, name]
        for figure in FIGURES:
            values = [one.figures[figure] for one in same if figure in one.figures]
            row.append(f"{statistics.median(values):.4g}" if values else "")
            ratios = [
                one.figures[figure] / ours[dtype, workload, one.round][figure]
                for one in same
                if name != OURS and figure in one.figures and figure in ours.get((dtype, workload, one.round), {})
            ]
            row.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "")
        rows.append(row)
    headers = ["dtype", "workload", "engine"]
    for text in FIGURES.values():
        headers += [text, "/ ours"]
    return tabulate(rows, headers, disable_numparse=True)
