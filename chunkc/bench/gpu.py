"""``python -m chunkc.bench gpu``: are tokens right on a GPU, and what do prompts cost the decodes beside them there?

First greedy tokens in float32, in every mode, against HuggingFace's generate on the same device; then, with random
weights of the shape of a 1B Llama in bfloat16, decode latency and prefill throughput for every mode, for ``streams``
with several divisions of the SMs. Rows take turns, round by round, until the time is over; what was left out is said.

Nothing of this has run on a GPU yet. ``--device cpu --tiny`` runs the same program with a tiny model.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from chunkc.bench import gpu_models
from chunkc.bench.arguments import positive
from chunkc.bench.gpu_models import Placed
from chunkc.bench.multiplex import Row, compare, report
from chunkc.bench.multiplex_run import Load, measure, needed_tokens
from chunkc.bench.progress import stage
from chunkc.errors import ChunkcError

DESCRIPTION = "equality and multiplexing on a GPU, in five minutes"
_ALONE = "decode alone"
_GRACE = 20  # seconds over the limit after which a program that hangs ends itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and load, to try the program out")
    parser.add_argument("--seconds", type=positive, default=285, metavar="N", help="limit (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        sizes, check_sizes: of the model that is measured, and of the one whose tokens are compared.
        load: what is served.
        budgets: of one batch, of ``layers`` and of ``streams``.
        steps: the decodes make at most so many.
        rounds: at most.
    """

    sizes: dict[str, Any]
    check_sizes: dict[str, Any]
    load: Load
    budgets: tuple[list[int | None], list[int], int]
    steps: int
    rounds: int


FULL = Plan(
    gpu_models.LARGE,
    gpu_models.SMALL,
    Load(32, 512, 4096, 6),
    ([64, 256, 1024, 2080, None], [256, 1024], 2048),
    2000,
    5,
)
TINY = Plan(gpu_models.TINY, gpu_models.TINY, Load(2, 4, 40, 1), ([16, None], [16], 32), 400, 1)


class Deadline:
    """What is left of the time.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._end = clock, clock() + seconds
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - self._clock()

    def allows(self, what: str, seconds: float) -> bool:
        """Whether there is time for something that takes so many seconds; notes it as left out if there is not."""
        if self.left >= seconds:
            return True
        self.left_out.append(what)
        return False


def run(args: argparse.Namespace) -> int:
    import torch

    plan, deadline = TINY if args.tiny else FULL, Deadline(args.seconds)
    if args.json and not args.json.resolve().parent.is_dir():
        raise ChunkcError(f"no folder {args.json.resolve().parent} to write {args.json.name} to")
    machine = _machine(torch.device(args.device))
    on_gpu = machine.device.type != "cpu"
    if on_gpu:
        faulthandler.dump_traceback_later(args.seconds + _GRACE, exit=True)
    results: dict[str, Any] = {"device": _describe(machine), "torch": torch.__version__, "tiny": args.tiny}
    print(f"{results['device']}, torch {torch.__version__}", flush=True)
    try:
        results["divisions"] = _check_divisions(machine) if on_gpu else {}
        results["checks"] = check_tokens(plan, machine, deadline)
        wrong = [name for name, fine in results["checks"].items() if not fine]
        results["rows"] = measure_rows(plan, machine, deadline)
    finally:
        if on_gpu:
            faulthandler.cancel_dump_traceback_later()
        results["left_out"] = deadline.left_out
        if args.json:
            args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    if deadline.left_out:
        print(f"\nLeft out, as the time was over: {'; '.join(deadline.left_out)}")
    print(f"\n{len(results['checks']) - len(wrong)} of {len(results['checks'])} checks passed")
    for name in wrong:
        print(f"FAILED: {name}", file=sys.stderr)
    return int(bool(wrong))


def _machine(device: Any) -> Any:
    import torch

    from chunkc.runtime.machine import CORES

    if device.type == "cpu":
        return CORES
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ChunkcError(f"torch finds no device {str(device)!r}; --device cpu --tiny tries the program out")
    from chunkc.runtime.cuda_lanes import CudaMachine

    return CudaMachine(device)


def _describe(machine: Any) -> str:
    import torch

    if machine.device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(machine.device)}, {machine.num_sms} SMs"


def _check_divisions(machine: Any) -> dict[str, str]:
    """Which SMs the two streams of each division run on, as a kernel finds them."""
    from chunkc.kernels.triton_probe import sms_in_use

    found = {}
    for division in tried(machine):
        lanes = machine.lanes(division)
        decode, prefill = (lane.submit(lambda: sms_in_use(machine.device)).result() for lane in lanes)
        for lane in lanes:
            lane.close()
        found[str(division)] = f"{len(decode)} and {len(prefill)} SMs seen, {len(decode & prefill)} of them in both"
        print(f"{division}: {found[str(division)]}", flush=True)
    return found


def tried(machine: Any) -> list[Any]:
    """A few of the machine's divisions: the smallest share for the decodes, larger ones, and the last."""
    try:
        every = machine.divisions()
    except ValueError:  # one core
        return []
    last = len(every) - 1
    return [every[index] for index in sorted({min(1, last), last // 4, last // 2, last})]


# ---- tokens ---------------------------------------------------------------------------------------------


def check_tokens(plan: Plan, machine: Any, deadline: Deadline) -> dict[str, bool]:
    """Greedy tokens of every mode against HuggingFace's, by name of the check."""
    import torch

    from chunkc.config import SamplingParams

    with stage("Preparing the model for the check"):
        placed = gpu_models.place(plan.check_sizes, torch.float32, machine, tokens=4096, max_requests=8)
    lengths, new = (1, 90, 17, 200, 40, 5), 12
    prompts = [[(number * 131 + at * 7919) % placed.runner.vocab_size for at in range(n)] for number, n in
               enumerate(lengths)]  # fmt: skip
    with stage("HuggingFace's tokens"):
        expected = _generate(placed.model, prompts, new, machine.device)
    checks: dict[str, bool] = {}

    def check(name: str) -> None:
        if deadline.allows(f"check {name}", 5):
            done = placed.engine.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True), progress=False)
            checks[name] = [each.token_ids for each in done] == expected
            print(f"tokens, {name}: {'equal' if checks[name] else 'NOT equal'}", flush=True)

    divisions = tried(machine)
    for graphs in (False, True) if machine.device.type == "cuda" else (False,):
        if graphs:
            gpu_models.record_decodes(placed, machine, sizes=[1, 2, 4, 8], longest=300, divisions=divisions)
        after = " with CUDA graphs" * graphs
        for mode, budget in (("off", 32), ("off", None), ("layers", 32)):
            placed.engine.budget, placed.engine.multiplex = budget, mode
            check(f"{mode}, budget {budget or 'whole'}{after}")
        for division in divisions:
            _use(placed, division, 32)
            check(f"streams, {division}{after}")
    if placed.runner.decode_graphs is not None:
        checks["CUDA graphs were used"] = placed.runner.decode_graphs.replayed > 0
    return checks


def _generate(model: Any, prompts: list[list[int]], new: int, device: Any) -> list[list[int]]:
    import torch

    model = model.to(device)  # its parameters; the engine has copies
    with torch.no_grad():
        done = [
            model.generate(
                torch.tensor([prompt], device=device),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long, device=device),
                max_new_tokens=new,
                do_sample=False,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]
    model.to("cpu")
    return done


# ---- time -----------------------------------------------------------------------------------------------


def measure_rows(plan: Plan, machine: Any, deadline: Deadline) -> list[dict[str, Any]]:
    """Measures until the time is over and prints the table; every run's figures."""
    import torch

    if not deadline.allows("all measurements", 60 if plan is FULL else 1):
        return []
    load = plan.load
    with stage("Preparing the model"):
        dtype = torch.bfloat16 if machine.device.type == "cuda" else torch.float32
        tokens = needed_tokens(load, plan.steps)
        placed = gpu_models.place(plan.sizes, dtype, machine, tokens=tokens, max_requests=load.decodes + 4)
    divisions = tried(machine)
    if machine.device.type == "cuda":
        with stage("Recording decode steps"):
            longest = load.context + plan.steps + 16
            gpu_models.record_decodes(placed, machine, sizes=[load.decodes], longest=longest, divisions=divisions)
    mixed, layers, streams = plan.budgets
    rows: list[tuple[Row, Any]] = [(Row(_ALONE, "off", None), None)]
    rows += [(Row("whole" if size is None else f"one batch, {size}", "off", size), None) for size in mixed]
    rows += [(Row(f"layers, {size}", "layers", size), None) for size in layers]
    rows += [(Row(f"streams, {division}, {streams}", "streams", streams), division) for division in divisions]

    runs: list[dict[str, Any]] = []
    took: dict[str, float] = {}
    for row, division in rows:
        if deadline.allows(row.name, 15 if plan is FULL else 1):
            took[row.name] = _one_row(placed, row, division, replace(load, prompts=1), plan, None)
    for number, (row, division) in itertools.product(range(plan.rounds), rows):
        what = f"round {number + 1}: {row.name}"
        if row.name in took and deadline.allows(what, 2 + 1.3 * took[row.name] * (load.prompts if number == 0 else 1)):
            took[row.name] = _one_row(placed, row, division, load, plan, what)
            runs.append({"row": row.name, "budget": row.budget, "round": number, **asdict(row.points[-1])})
    shown = [row for row, _ in rows if row.points]
    print(
        f"\n{load.decodes} decodes from {load.context} tokens on, {load.prompts} prompts of {load.prompt} tokens one "
        f"after the other, {max((len(row.points) for row in shown), default=0)} round(s)"
    )
    if shown:
        print(report(shown))
        print("\n".join(compare(shown)))
    return runs


def _one_row(placed: Placed, row: Row, division: Any, load: Load, plan: Plan, what: str | None) -> float:
    """Serves the load in a row's mode, and adds a point to the row where ``what`` says what it is; the seconds."""
    engine, began = placed.engine, time.monotonic()
    if division is None:
        engine.budget, engine.multiplex = row.budget, row.mode  # type: ignore[assignment]
    else:
        _use(placed, division, row.budget)
    if row.name == _ALONE:
        load, steps = replace(load, prompts=0), min(plan.steps, 120)
    else:
        steps = plan.steps
    with stage(what or f"Warming up: {row.name}"):
        point = measure(engine, load, steps=steps)
    if what is not None:
        row.points.append(point)
    return time.monotonic() - began


def _use(placed: Placed, division: Any, budget: int | None) -> None:
    engine = placed.engine
    engine.budget, engine.decode_cores, engine.multiplex = budget, division.decode_units, "streams"
