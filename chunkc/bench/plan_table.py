"""What ``python -m chunkc.bench plan`` prints."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from chunkc.bench.plan_model import Batch, Outcome, simulate_grid, simulate_plan
from chunkc.kernels.device import DeviceModel
from chunkc.kernels.tasks import AttentionShape, TaskTable, plan_tasks

OURS, GRID = "chunkc", "vLLM-style grid"
WITHIN = 1.1  # of the ideal
PLANNING_RUNS = 200


@dataclass(frozen=True)
class Planner:
    """``plan_tasks`` for one shape on one device; a block of rows or a cut of the keys of None is chosen."""

    shape: AttentionShape
    device: DeviceModel
    page_size: int
    q_block: int | None = None
    kv_split: int | None = None

    def plan(self, batch: Batch) -> TaskTable:
        return plan_tasks(
            *batch.tensors,
            self.shape,
            page_size=self.page_size,
            units=self.device.slots,
            q_block=self.q_block,
            kv_split=self.kv_split,
            device=self.device,
        )

    def outcome(self, batch: Batch, table: TaskTable) -> Outcome:
        return simulate_plan(table, batch, self.shape, self.device)

    def grid_outcome(self, batch: Batch) -> Outcome:
        return simulate_grid(batch, self.shape, self.device)


def batch_table(batch: Batch, planner: Planner) -> str:
    """The plan of one batch and the grid, a column each."""
    table = planner.plan(batch)
    times = []
    for _ in range(PLANNING_RUNS):
        started = time.perf_counter()
        planner.plan(batch)
        times.append(time.perf_counter() - started)
    ours, grid = planner.outcome(batch, table), planner.grid_outcome(batch)
    tasks = table.tasks.numpy()
    is_decode = batch.q_lens[tasks[:, 0]] == 1
    rows, keys = tasks[:, 3] - tasks[:, 2], tasks[:, 5] - tasks[:, 4]
    lines = [
        ["tasks", ours.tasks, grid.tasks],
        ["  of prefills", np.count_nonzero(~is_decode), ""],
        ["  of decodes", np.count_nonzero(is_decode), ""],
        ["  pieces of cut blocks", np.count_nonzero(tasks[:, 6] >= 0), ""],
        ["merges", len(table.merges), ""],
        ["most rows of a prefill's task", rows[~is_decode].max(initial=0), ""],
        ["most keys of a decode's task", keys[is_decode].max(initial=0), ""],
        ["makespan, us", *(f"{1e6 * x.makespan:.1f}" for x in (ours, grid))],
        ["ideal, us", *(f"{1e6 * x.ideal:.1f}" for x in (ours, grid))],
        ["makespan / ideal", *(f"{x.ratio:.3f}" for x in (ours, grid))],
        ["waste of the units' time", *(f"{1 - 1 / x.ratio:.1%}" for x in (ours, grid))],
        ["  more work", *(f"{x.extra / x.makespan:.1%}" for x in (ours, grid))],
        ["  overhead of tasks", *(f"{x.overhead / x.makespan:.1%}" for x in (ours, grid))],
        ["  idle at the end", *(f"{x.idle / x.makespan:.1%}" for x in (ours, grid))],
        ["planning, us", f"{1e6 * statistics.median(times):.0f}", "-"],
    ]
    notes = (
        "More work: keys read again for other rows, rows padded to an instruction, causal corners. Planning: the\n"
        f"median of {PLANNING_RUNS} runs. The grid: tiles of 16 rows, requests in order; keys are cut where all\n"
        "requests are decodes and few."
    )
    return f"{_tabulate(lines, ['', OURS, GRID], 1)}\n\n{notes}"


def trace_table(batches: Sequence[Batch], planner: Planner) -> str:
    """How the plans of many batches and the grid come out, by kind of batch."""
    ours = [planner.outcome(batch, planner.plan(batch)) for batch in batches]
    grid = [planner.grid_outcome(batch) for batch in batches]
    kinds = {
        "all": [True] * len(batches),
        "decodes": [int(batch.q_lens.max()) == 1 for batch in batches],
        "with prefill": [int(batch.q_lens.max()) > 1 for batch in batches],
    }
    lines = []
    for name, outcomes in ((OURS, ours), (GRID, grid)):
        for kind, chosen in kinds.items():
            picked = [outcome for outcome, is_chosen in zip(outcomes, chosen, strict=True) if is_chosen]
            if picked:
                lines.append([name, kind, len(picked), *_trace_row(picked, planner.device)])
    headings = ["", "batches", "", "ideal\np50, us", "<= 1.1 x\nideal", "<= 1.1 x\nideal + start", "<= 1.1 x\nmean"]
    headings += [f"ratio\n{name}" for name in ("p50", "p90", "p95", "p99", "of sums")]
    notes = (
        "<= 1.1 x: share of the batches whose makespan is within 10% of the ideal; of the ideal and the start of one\n"
        f"task ({1e6 * planner.device.task_overhead:g} us), which each unit has to make; of what the units were busy "
        "with on average. Ratio: makespan / ideal."
    )
    return f"{_tabulate(lines, headings, 2)}\n\n{notes}"


def _trace_row(outcomes: Sequence[Outcome], device: DeviceModel) -> list[str]:
    makespan, ideal = (np.array([getattr(x, name) for x in outcomes]) for name in ("makespan", "ideal"))
    busy = makespan - np.array([x.idle for x in outcomes])
    ratio = makespan / ideal
    return [
        f"{1e6 * np.median(ideal):.1f}",
        *(f"{np.mean(makespan <= WITHIN * bound):.1%}" for bound in (ideal, ideal + device.task_overhead, busy)),
        *(f"{value:.3f}" for value in np.percentile(ratio, [50, 90, 95, 99])),
        f"{makespan.sum() / ideal.sum():.3f}",
    ]


def _tabulate(lines: list[list], headings: list[str], texts: int) -> str:
    """A table whose first ``texts`` columns are to the left."""
    from tabulate import tabulate

    alignment = ["left"] * texts + ["right"] * (len(headings) - texts)
    tabulate_options = {"disable_numparse": True, "tablefmt": "simple", "preserve_whitespace": True}
    return tabulate(lines, headers=headings, colalign=alignment, **tabulate_options)
