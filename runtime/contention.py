"""What decode and prefill cost each other on this machine: measured, as both want the same memory and the same cores.

For every division of the cores that is tried, four times are taken, each the median of a few runs: a decode step on
all cores, on its own cores alone, and on its own cores beside a prefill; the same for a prefill chunk. Decode slows
down twice on the way: by having fewer cores, and by sharing the memory bandwidth.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tabulate import tabulate

from chunkc.config import ResolvedSampling
from chunkc.runtime.batch import Chunk, PackedBatch, pack
from chunkc.runtime.fences import Stream
from chunkc.runtime.lanes import Worker
from chunkc.runtime.machine import CORES, Division, Machine
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request
from chunkc.runtime.teams import release_team

if TYPE_CHECKING:
    from chunkc.runtime.runner import ModelRunner

NUM_DECODES, CONTEXT, CHUNK, RUNS = 8, 64, 256, 5
#: a division is good if decode steps take at most this much longer beside a prefill than alone on all cores
TOLERABLE = 1.5


@dataclass(frozen=True)
class Cost:
    """Seconds of one decode step, or of one prefill chunk.

    Attributes:
        whole: on all cores, alone.
        alone: on its share of the cores, with the others idle.
        beside: on its share, while the other runs on the rest.
    """

    whole: float
    alone: float
    beside: float

    @property
    def slowdown(self) -> float:
        """By the neighbour: ``beside`` / ``alone``."""
        return self.beside / self.alone

    @property
    def total_slowdown(self) -> float:
        """By the neighbour and by having a share of the cores only: ``beside`` / ``whole``."""
        return self.beside / self.whole


@dataclass(frozen=True)
class Shared:
    """Decode and prefill under one division of the cores."""

    division: Division
    decode: Cost
    prefill: Cost


@dataclass(frozen=True)
class Contention:
    """What was measured. ``str()`` gives a table.

    Attributes:
        decodes, context: the decode steps: so many requests with so many tokens each.
        chunk: tokens of the prefill chunk.
        shared: a row for each division that was tried.
    """

    decodes: int
    context: int
    chunk: int
    shared: tuple[Shared, ...]

    @property
    def best(self) -> Shared:
        """The fastest prefill among those that slow decode down at most ``TOLERABLE`` times; if there is none, the
        one with the fastest decode."""
        good = [each for each in self.shared if each.decode.total_slowdown <= TOLERABLE]
        if good:
            return min(good, key=lambda each: each.prefill.beside)
        return min(self.shared, key=lambda each: each.decode.beside)

    def __str__(self) -> str:
        rows = [
            (
                f"{each.division}{' *' if each is self.best else ''}",
                *_cells(each.decode, lambda seconds: f"{seconds * 1e3:.1f}"),
                *_cells(each.prefill, lambda seconds: f"{self.chunk / seconds:.0f}"),
            )
            for each in self.shared
        ]
        decode = ("decode ms\nall cores", "own cores", "beside\nprefill", "slowdown\nby prefill")
        prefill = ("prefill tok/s\nall cores", "own cores", "beside\ndecode", "slowdown\nby decode")
        return (
            f"contention, {self.decodes} decodes at {self.context} tokens and chunks of {self.chunk} (cores for decode "
            "+ prefill; * is taken):\n" + tabulate(rows, ["cores", *decode, *prefill], disable_numparse=True)
        )


def _cells(cost: Cost, show: Callable[[float], str]) -> tuple[str, ...]:
    return show(cost.whole), show(cost.alone), show(cost.beside), f"{cost.slowdown:.2f}"


def candidates(divisions: Sequence[Division]) -> list[Division]:
    """Those worth measuring: one core for the decodes, a quarter and a half of all."""
    cores = len(divisions) + 1
    counts = sorted({1, max(1, cores // 4), max(1, cores // 2)})
    return [divisions[count - 1] for count in counts]


def measure(
    runner: ModelRunner,
    divisions: Sequence[Division],
    clock: Callable[[], float] = time.perf_counter,
    machine: Machine = CORES,
) -> Contention:
    """Measures on pages of its own; takes about as long as thirty chunks of 256 tokens a division.

    Args:
        runner: the model; is not serving meanwhile, or the figures are of no use.
        divisions: to be tried, at least one.
        clock: seconds, monotonic.
        machine: what the model runs on.
    """
    with machine.active():
        return _measure(runner, divisions, clock, machine)


def _measure(
    runner: ModelRunner, divisions: Sequence[Division], clock: Callable[[], float], machine: Machine
) -> Contention:
    context, chunk = min(CONTEXT, runner.max_positions - 1), min(CHUNK, runner.max_positions)
    probe = runner.with_pages(NUM_DECODES * -(-(context + 1) // runner.page_size) + -(-chunk // runner.page_size))
    prompts, decodes, prefill = _batches(probe, context, chunk)
    probe.run(prompts)

    def decode_step(stream: Stream) -> None:
        probe.run(decodes)
        stream.record().wait()

    def prefill_chunk(stream: Stream) -> None:
        probe.run(prefill)
        stream.record().wait()

    whole = _median(decode_step, machine.whole, clock), _median(prefill_chunk, machine.whole, clock)
    shared = []
    release_team()  # of all cores, which would have the lanes' threads sleep
    for division in divisions:
        lanes = machine.lanes(division)
        for lane in lanes:
            lane.wait(machine.whole.record())
        alone = [
            lane.submit(lambda work=work, lane=lane: _median(work, lane, clock)).result()
            for lane, work in zip(lanes, (decode_step, prefill_chunk), strict=True)
        ]
        beside = _beside(lanes, (decode_step, prefill_chunk), clock)
        costs = [Cost(*times) for times in zip(whole, alone, beside, strict=True)]
        shared.append(Shared(division, costs[0], costs[1]))
        for lane in lanes:
            lane.close()
    return Contention(NUM_DECODES, context, chunk, tuple(shared))


def _median(work: Callable[[Stream], None], stream: Stream, clock: Callable[[], float]) -> float:
    work(stream)
    times = []
    for _ in range(RUNS):
        began = clock()
        work(stream)
        times.append(clock() - began)
    return statistics.median(times)


def _beside(
    lanes: tuple[Worker, Worker],
    works: tuple[Callable[[Stream], None], Callable[[Stream], None]],
    clock: Callable[[], float],
) -> list[float]:
    """Medians of both, each while the other runs: both go on until each has run often enough."""
    enough = [threading.Event(), threading.Event()]
    times: list[list[float]] = [[], []]

    def keep_busy(index: int) -> None:
        try:
            while not all(event.is_set() for event in enough):
                began = clock()
                works[index](lanes[index])
                times[index].append(clock() - began)
                if len(times[index]) > RUNS:
                    enough[index].set()
        finally:
            enough[index].set()  # an error must not leave the other one waiting

    futures = [lane.submit(lambda index=index: keep_busy(index)) for index, lane in enumerate(lanes)]
    wait(futures)
    for future in futures:
        future.result()
    return [statistics.median(each[1:]) for each in times]


def _batches(runner: ModelRunner, context: int, chunk: int) -> tuple[PackedBatch, PackedBatch, PackedBatch]:
    """(the decodes' prompts, their next tokens, the prefill chunk)."""
    pool = PagePool(runner.num_pages, runner.page_size, NUM_DECODES + 1)
    generator = np.random.default_rng(0)

    def request(tokens: int) -> Request:
        prompt = generator.integers(runner.vocab_size, size=tokens)
        made = Request.create("probe", 0, prompt, ResolvedSampling(max_new_tokens=1), RequestMetrics(0.0))
        made.row = pool.open_row()
        pool.extend(made.row, pool.pages_for(tokens))
        return made

    decodes = [request(context + 1) for _ in range(NUM_DECODES)]
    return (
        pack([Chunk(each, 0, context) for each in decodes], pool),
        pack([Chunk(each, context, context + 1) for each in decodes], pool),
        pack([Chunk(request(chunk), 0, chunk)], pool),
    )
