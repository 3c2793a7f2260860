"""``python -m chunkc.bench serve``, the default: one model and workload, whole against chunked prefill.

The model is compiled once. Each configuration is an engine budget, plus HuggingFace's ``generate`` one
request after another for comparison. Every configuration is warmed up once, outside the figures; then the
configurations take turns, run by run, so that whatever else the machine does falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from chunkc.bench import table
from chunkc.bench.arguments import budget, positive
from chunkc.bench.clock import Trace, generate_one_by_one, serve
from chunkc.bench.files import opened
from chunkc.bench.metrics import measure
from chunkc.bench.progress import stage
from chunkc.bench.workload import Workload, builtin_workload, load_workloads
from chunkc.config import MULTIPLEX
from chunkc.errors import ChunkcError
from chunkc.models import DEFAULT_MODEL, DTYPES, load

DESCRIPTION = "serve a workload with whole and with chunked prefill, and with HuggingFace's generate"
WHOLE, HF = "whole prefill", "HF generate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help="HuggingFace name or folder, .gguf file or a folder that holds one (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="(default: %(default)s)")
    parser.add_argument(
        "--budget",
        nargs="+",
        type=budget,
        default=[None, 64, 128, 512],
        metavar="N",
        help="token budgets to run, a row each; 'whole' stands for whole prefill (default: whole 64 128 512)",
    )
    parser.add_argument(
        "--workload",
        type=Path,
        metavar="FILE",
        help="JSON file of requests in place of the built-in workload",
    )
    parser.add_argument(
        "--which",
        nargs="+",
        metavar="NAME",
        help="workloads to take from a file of named ones (default: all)",
    )
    parser.add_argument(
        "--repeat", type=positive, default=3, metavar="N", help="runs of each row (default: %(default)s)"
    )
    parser.add_argument("--threads", type=positive, metavar="N", help="threads for torch (default: torch's)")
    parser.add_argument(
        "--multiplex",
        nargs="+",
        choices=MULTIPLEX,
        default=["off"],
        help="how prefill and decode share the machine; a row for each, at every budget but 'whole' (default: off)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="write the last run of each row as a trace for ui.perfetto.dev",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object per run, a line each")
    parser.add_argument("--no-hf", action="store_true", help="leave out HuggingFace's generate")


@dataclass(frozen=True)
class Configuration:
    """A row of the table: its name, its budget (None: not chunked), and how it serves a workload.

    ``trace`` gives the events of the last run for the trace file, as a process of a number.
    """

    name: str
    budget: int | None
    serve: Callable[[Workload], Trace]
    compile_s: float | None = None
    trace: Callable[[int], list[dict[str, Any]]] | None = None


def run(args: argparse.Namespace) -> int:
    if args.which and args.workload is None:
        raise ChunkcError("--which chooses from a file: give --workload as well")
    workloads = load_workloads(args.workload, args.which) if args.workload else None
    traced: list[dict[str, Any]] = []
    with opened(args.json) as record, opened(args.trace) as trace_file:
        configurations, workloads = _prepare(args, workloads)
        for workload in workloads:
            print(f"{args.model}, {args.dtype}, {workload.name}: {workload.describe()}")
            rows = _measure_all(configurations, workload, args, record, traced)
            _report(rows, args, configurations)
        if trace_file:
            json.dump({"traceEvents": traced}, trace_file)
    return 0


def _prepare(args: argparse.Namespace, workloads: list[Workload] | None) -> tuple[list[Configuration], list[Workload]]:
    with stage(f"Loading {args.model} in {args.dtype}"):
        import torch

        import chunkc

        if args.threads:
            torch.set_num_threads(args.threads)
        model, tokenizer = load(args.model, dtype=args.dtype)
    with stage("Compiling"):
        started = time.perf_counter()
        engine = chunkc.compile(model)
        compile_s = time.perf_counter() - started
        if "streams" in args.multiplex:
            try:
                engine.calibrate()
            except ValueError as error:
                raise ChunkcError(str(error)) from error
    configurations = [
        _engine_row(engine, budget, mode, compile_s)
        for budget in dict.fromkeys(args.budget)
        for mode in ("off",) * (budget is None) or dict.fromkeys(args.multiplex)
    ]
    if not args.no_hf:
        configurations.append(Configuration(HF, None, lambda workload: generate_one_by_one(model, workload)))
    vocab_size = model.config.get_text_config().vocab_size
    return configurations, workloads or [builtin_workload(tokenizer, vocab_size)]


def _engine_row(engine: Any, budget: int | None, mode: str, compile_s: float) -> Configuration:
    from chunkc.runtime.perfetto import trace_events

    name = _row_name(budget) if mode == "off" else f"{_row_name(budget)}, {mode}"
    last: list[Any] = []

    def serve_with_budget(workload: Workload) -> Trace:
        engine.budget, engine.multiplex = budget, mode
        engine.reset_metrics()
        trace = serve(engine, workload)
        last[:] = [engine.metrics]
        return trace

    return Configuration(
        name, budget, serve_with_budget, compile_s, lambda number: trace_events(last[0], process=number, name=name)
    )


def _row_name(budget: int | None) -> str:
    return WHOLE if budget is None else f"budget {budget}"


def _measure_all(
    configurations: Sequence[Configuration],
    workload: Workload,
    args: argparse.Namespace,
    record: TextIO | None,
    traced: list[dict[str, Any]],
) -> table.Rows:
    rows: table.Rows = {configuration.name: [] for configuration in configurations}
    with stage(f"Warming up {len(configurations)} configurations, outside the figures"):
        for configuration in configurations:
            configuration.serve(workload.warm_up())
    for run_number in range(args.repeat):
        for configuration in configurations:
            with stage(f"Run {run_number + 1} of {args.repeat}, {configuration.name}"):
                trace = configuration.serve(workload)
            result = measure(
                trace,
                workload,
                config=configuration.name,
                dtype=args.dtype,
                budget=configuration.budget,
                run=run_number,
                compile_s=configuration.compile_s,
            )
            rows[configuration.name].append(result)
            if record:
                print(json.dumps(result.to_json()), file=record, flush=True)
    if args.trace:
        for configuration in configurations:
            if configuration.trace:
                number = len({event["pid"] for event in traced}) + 1
                traced += configuration.trace(number)
    return rows


def _report(rows: table.Rows, args: argparse.Namespace, configurations: Sequence[Configuration]) -> None:
    import torch

    print()
    print(table.render(rows))
    print()
    compile_s = next((each.compile_s for each in configurations if each.compile_s is not None), None)
    compiling = "" if compile_s is None else f" and compiling ({compile_s:.1f} s)"
    print(
        f"Times in ms; medians of {_count(args.repeat, 'run')} a row, taken in turns; "
        f"{_count(torch.get_num_threads(), 'thread')}.\nSpread: (max - min) / median of the wall time. "
        f"Not in the figures: a warm-up run of each row{compiling}."
    )
    print(table.compare_tokens(rows, args.dtype))
    chunked = [budget for budget in args.budget if budget is not None]
    smallest = _row_name(64 if 64 in chunked else min(chunked)) if chunked else None
    closing = table.closing_line(rows, WHOLE, smallest)
    if closing:
        print(closing)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
