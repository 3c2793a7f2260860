"""Batches as a server would have formed them: a trace of requests through the engine's own scheduler, under a virtual
clock."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from chunkc.bench.plan_model import Batch, ideal_seconds
from chunkc.bench.workload import WorkloadError
from chunkc.config import ResolvedSampling
from chunkc.kernels.device import DeviceModel
from chunkc.kernels.tasks import AttentionShape
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request
from chunkc.runtime.scheduler import Scheduler

COLUMNS = ("arrived_at", "num_prefill_tokens", "num_decode_tokens")
CACHED_TOKENS = 400_000  # what 50 GB hold of a model with 8 key/value heads of 128 in 32 layers and 16 bits
MAX_RUNNING = 256


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: when it comes (seconds), tokens of its prompt, tokens it generates."""

    at: float
    prompt: int
    new: int


@dataclass(frozen=True)
class ServedModel:
    """What a step takes besides its attention: each parameter is read once and multiplied with every token."""

    parameters: float
    layers: int

    def linear_seconds(self, tokens: int, device: DeviceModel) -> float:
        return max(
            self.parameters * device.itemsize / device.bandwidth, 2 * self.parameters * tokens / device.matrix_rate
        )


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """Requests of a CSV file with the columns of COLUMNS, by arrival; at most the first ``limit``.

    Raises:
        WorkloadError: no such file, or not of that form.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise WorkloadError(f"the trace {path} has no column {missing[0]!r}; it needs {', '.join(COLUMNS)}")
            rows = [Arrival(*(float(row[name]) for name in COLUMNS)) for row in reader]
    except OSError as error:
        raise WorkloadError(f"cannot read the trace {path}: {error.strerror}") from error
    except (TypeError, ValueError) as error:
        raise WorkloadError(f"the trace {path} has a line that is not three numbers: {error}") from error
    arrivals = [Arrival(row.at, int(row.prompt), int(row.new)) for row in rows if row.prompt >= 1 and row.new >= 1]
    if not arrivals:
        raise WorkloadError(f"the trace {path} holds no request")
    return sorted(arrivals, key=lambda arrival: arrival.at)[:limit]


def batches(
    arrivals: Sequence[Arrival],
    model: ServedModel,
    shape: AttentionShape,
    device: DeviceModel,
    *,
    budget: int,
    page_size: int,
    rate: float = 1.0,
) -> Iterator[Batch]:
    """The batch of every step until the last request has come: what is left is no traffic any more.

    A step takes the time of the model's linear layers and, in every layer, the ideal of its attention.

    Args:
        arrivals: by arrival.
        model, shape, device: what is served, its attention, and on what.
        budget: tokens per step.
        page_size: tokens per page.
        rate: how many times faster than in the trace the requests arrive.
    """
    pool = PagePool(CACHED_TOKENS // page_size, page_size, MAX_RUNNING)
    scheduler = Scheduler(pool, budget=budget, max_requests=MAX_RUNNING)
    now, added = 0.0, 0
    while added < len(arrivals):
        if not scheduler.num_unfinished:
            now = max(now, arrivals[added].at / rate)
        while added < len(arrivals) and arrivals[added].at / rate <= now:
            scheduler.add(_request(added, arrivals[added]))
            added += 1
        plan = scheduler.schedule()
        chunks = plan.batch
        batch = Batch(np.array([chunk.num_tokens for chunk in chunks]), np.array([chunk.end for chunk in chunks]))
        yield batch
        now += model.linear_seconds(batch.num_tokens, device) + model.layers * ideal_seconds(batch, shape, device)
        samplers = [chunk.request for chunk in chunks if chunk.samples]
        scheduler.commit(plan.batch)
        for request in samplers:
            request.append(0)
            if request.is_full:
                scheduler.remove(request)


def _request(number: int, arrival: Arrival) -> Request:
    sampling = ResolvedSampling(max_new_tokens=arrival.new)
    prompt = np.zeros(arrival.prompt, dtype=np.int64)
    return Request.create(f"r{number}", number, prompt, sampling, RequestMetrics(arrival.at))
