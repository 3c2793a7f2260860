"""``python -m chunkc.bench plan``: the task list of a step's attention, and how well it would keep a device busy.

Nothing is run. A task costs what :mod:`chunkc.kernels.device` says: the larger of the bytes it reads over its share
of the bandwidth and its arithmetic over its share of the matrix rate; its rows' queries, outputs or partials; and a
fixed overhead. Units take the next task of the list as they get free; the last one to end makes the makespan. The
ideal knows the batch and not the plan: all keys are read once, all visible pairs are multiplied once, all evenly
spread, and nothing is ever started, so no plan reaches it. The rates are those of the device model; see there where
they come from.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import torch

from chunkc.bench import plan_trace
from chunkc.bench.arguments import positive
from chunkc.bench.plan_model import Batch
from chunkc.bench.plan_table import Planner, batch_table, trace_table
from chunkc.bench.progress import stage
from chunkc.errors import ChunkcError
from chunkc.kernels import device as devices
from chunkc.kernels.device import DeviceModel
from chunkc.kernels.tasks import AttentionShape

DESCRIPTION = "plan the attention of a batch, or of all batches of a trace, and predict how busy it keeps a device"
_INT32, _MOST_REQUESTS = 2**31 - 1, 10**6
DEFAULT_DECODES, DEFAULT_PREFILLS = ["128x2048"], ["2048@0"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--decodes",
        nargs="*",
        metavar="NxKV",
        help=f"N requests with one new token and KV tokens in all (default: {' '.join(DEFAULT_DECODES)})",
    )
    parser.add_argument(
        "--prefills",
        nargs="*",
        metavar="[Nx]T@P",
        help=f"N requests with T new tokens after P cached ones (default: {' '.join(DEFAULT_PREFILLS)})",
    )
    parser.add_argument(
        "--heads",
        default="32/8/128",
        metavar="Q/KV/DIM",
        help="query heads, key/value heads, dim (default: %(default)s)",
    )
    parser.add_argument("--window", type=_count, default=0, metavar="N", help="sliding window in keys (default: none)")
    parser.add_argument("--chunk", type=_count, default=0, metavar="N", help="attention chunk in keys (default: none)")
    parser.add_argument("--page-size", type=positive, default=16, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--device",
        default="h100",
        metavar="NAME",
        help="h100, h200, cuda (the GPU here), cpu (as many threads as torch uses), or a number of CPU threads "
        "(default: %(default)s)",
    )
    parser.add_argument("--overhead", type=float, metavar="US", help="microseconds of a task (default: the device's)")
    parser.add_argument(
        "--q-block", type=positive, metavar="N", help="most rows in a task (default: the planner's choice)"
    )
    parser.add_argument("--kv-split", type=positive, metavar="N", help="most keys in a task (default: as above)")
    trace = parser.add_argument_group("a trace in place of one batch")
    trace.add_argument("--trace", type=Path, metavar="FILE", help=f"CSV file with {', '.join(plan_trace.COLUMNS)}")
    trace.add_argument("--budget", type=positive, default=512, metavar="N", help="tokens a step (default: %(default)s)")
    trace.add_argument(
        "--requests", type=positive, default=3000, metavar="N", help="of the trace (default: %(default)s)"
    )
    trace.add_argument("--rate", type=float, default=1.0, metavar="X", help="times the trace's speed (default: 1)")
    trace.add_argument(
        "--batches", type=positive, default=2000, metavar="N", help="evaluated, evenly spread (default: %(default)s)"
    )
    trace.add_argument(
        "--parameters", type=float, default=8e9, metavar="N", help="of the model served (default: %(default)g)"
    )
    trace.add_argument("--layers", type=positive, default=32, metavar="N", help="of that model (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    if not (0 < args.rate < math.inf and 0 < args.parameters < math.inf):
        raise ChunkcError("--rate and --parameters must be positive")
    try:
        return _run(args)
    except MemoryError as error:
        raise ChunkcError(f"there is not enough memory to plan this: {error}") from error


def _run(args: argparse.Namespace) -> int:
    shape, device = _shape(args), _device(args)
    planner = Planner(shape, device, args.page_size, args.q_block, args.kv_split)
    where = f"{args.heads}, page size {args.page_size}, on {device.name} ({device.units} units)"
    if args.trace is None:
        batch = _batch(args, shape)
        print(f"{where}: {_describe(batch)}\n\n{batch_table(batch, planner)}")
        return 0
    if args.decodes is not None or args.prefills is not None:
        raise ChunkcError("a trace makes its own batches: leave out --decodes and --prefills")
    arrivals = plan_trace.read_trace(args.trace, args.requests)
    model = plan_trace.ServedModel(args.parameters, args.layers)
    options = {"budget": args.budget, "page_size": args.page_size, "rate": args.rate}
    with stage(f"Scheduling {len(arrivals)} requests"):
        steps = list(plan_trace.batches(arrivals, model, shape, device, **options))
    chosen = np.unique(np.linspace(0, len(steps) - 1, args.batches).astype(int))
    with stage(f"Planning {len(chosen)} batches"):
        table = trace_table([steps[i] for i in chosen], planner)
    print(f"{where}: {len(chosen)} of {len(steps)} steps of {len(arrivals)} requests, budget {args.budget}\n\n{table}")
    return 0


def _shape(args: argparse.Namespace) -> AttentionShape:
    numbers = args.heads.split("/")
    if not 3 <= len(numbers) <= 4 or not all(number.isdecimal() for number in numbers):
        raise ChunkcError(f"--heads must be query heads/key-value heads/dim, as in 32/8/128, not {args.heads!r}")
    q_heads, kv_heads, qk_dim, v_dim = map(int, (*numbers, numbers[-1])[:4])
    try:
        return AttentionShape(q_heads, kv_heads, qk_dim, v_dim, window=args.window, chunk=args.chunk)
    except ValueError as error:
        raise ChunkcError(f"--heads {args.heads}: {error}") from error


def _device(args: argparse.Namespace) -> DeviceModel:
    name = args.device.lower()
    if name in ("h100", "h200"):
        device = devices.H100 if name == "h100" else devices.H200
    elif name == "cuda" and torch.cuda.is_available():
        device = devices.cuda(torch.cuda.get_device_properties(torch.cuda.current_device()))
    elif name == "cpu" or (name.isdecimal() and int(name)):
        device = devices.cpu(torch.get_num_threads() if name == "cpu" else int(name))
    else:
        raise ChunkcError(
            f"--device must be h100, h200, cpu, a number of threads, or cuda where there is one, not {args.device!r}"
        )
    if args.overhead is None:
        return device
    if not 0 <= args.overhead < math.inf:
        raise ChunkcError(f"--overhead must be 0 or more microseconds, not {args.overhead:g}")
    return dataclasses.replace(device, task_overhead=args.overhead / 1e6)


def _batch(args: argparse.Namespace, shape: AttentionShape) -> Batch:
    decodes, prefills = args.decodes, args.prefills
    if decodes is None and prefills is None:
        decodes, prefills = DEFAULT_DECODES, DEFAULT_PREFILLS
    requests: list[tuple[int, int]] = []  # new tokens, tokens
    for text in decodes or ():
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
        if match is None or int(match[2]) < 1:
            raise ChunkcError(f"--decodes takes for example 128x2048 (128 requests of 2048 tokens), not {text!r}")
        requests += _requests(1, int(match[2]), match[1], text)
    for text in prefills or ():
        match = re.fullmatch(r"(?:(\d+)x)?(\d+)(?:@(\d+))?", text)
        if match is None or int(match[2]) < 1:
            raise ChunkcError(
                f"--prefills takes for example 2048@0 (2048 tokens, none cached) or 4x512@1024, not {text!r}"
            )
        requests += _requests(int(match[2]), int(match[2]) + int(match[3] or 0), match[1], text)
    if not requests:
        raise ChunkcError("there is nothing to plan: give --decodes or --prefills at least one request")
    if sum(new for new, _ in requests) * shape.group > _INT32:
        raise ChunkcError(f"a plan has at most {_INT32} rows, query heads of a key/value head counted")
    return Batch(*np.array(requests, dtype=np.int64).T)


def _requests(new: int, tokens: int, count: str | None, text: str) -> list[tuple[int, int]]:
    times = 1 if count is None else int(count)
    if tokens > _INT32 or times > _MOST_REQUESTS:
        raise ChunkcError(f"a batch has at most {_MOST_REQUESTS} requests of {_INT32} tokens each, and {text!r} more")
    return [(new, tokens)] * times


def _describe(batch: Batch) -> str:
    decodes = np.count_nonzero(batch.q_lens == 1)
    counts = {"decode": decodes, "prefill": len(batch.q_lens) - decodes, "new token": batch.num_tokens}
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'}" for what, count in counts.items())


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer >= {least}, not {text!r}")
    return int(text)
