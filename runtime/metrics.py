"""What the engine measures about itself: one record per step, and sums over all of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from chunkc.runtime.multiplex import Mode
from chunkc.runtime.spans import Span, SpanLog

MAX_RECORDS = 65_536  # the latest steps are kept one by one; the sums cover all
_SUMS = (
    "steps",
    "decode_tokens",
    "prefill_tokens",
    "prefix_tokens",
    "preemptions",
    "failed_steps",
    "busy_s",
    "run_s",
)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times in seconds.

    Attributes:
        step: its number.
        start: when it began, on the engine's clock.
        schedule_s: deciding what to compute.
        run_s: packing the batch and running the model.
        total_s: the whole step, sampling and text included.
        budget: the token budget, None if unlimited.
        decode_tokens: tokens of running decodes.
        prefill_tokens: tokens of prefill chunks; those of a prefill apart from the batch count in the step in which
            it ends.
        requests: requests in the batch.
        waiting: requests that waited without pages after the step was planned.
        pages_used: pages held while the step ran.
        preemptions: requests that lost their pages to this step.
        failed: whether the model raised an error.
        mode: how prefill and decode shared the machine, see ``multiplex.py``.
        apart: whether a prefill was under way apart from the batch.
        prefix_tokens: tokens whose keys and values were in the cache already and were read again, in every layer,
            by the prefill chunks that ``prefill_tokens`` counts.
    """

    step: int
    start: float
    schedule_s: float
    run_s: float
    total_s: float
    budget: int | None
    decode_tokens: int
    prefill_tokens: int
    requests: int
    waiting: int
    pages_used: int
    preemptions: int
    failed: bool = False
    mode: Mode = "off"
    apart: bool = False
    prefix_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All tokens of the step."""
        return self.decode_tokens + self.prefill_tokens

    @property
    def overhead_s(self) -> float:
        """Seconds that were not the model's."""
        return self.total_s - self.run_s


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """A snapshot of an engine.

    Attributes:
        steps: steps so far; the same for the other sums.
        running, waiting: requests at this moment.
        pages_used, num_pages: the cache at this moment.
        records: the latest steps, oldest first, at most ``MAX_RECORDS``.
        spans: what ran where, oldest first, the latest ones.
    """

    steps: int = 0
    decode_tokens: int = 0
    prefill_tokens: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    failed_steps: int = 0
    busy_s: float = 0.0
    run_s: float = 0.0
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    num_pages: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    records: tuple[StepRecord, ...] = ()
    spans: tuple[Span, ...] = ()

    def summary(self) -> dict[str, float]:
        """Sums and means for a table; times in milliseconds where the name says so."""
        steps = max(self.steps, 1)
        return {
            "steps": self.steps,
            "decode_tokens_per_step": self.decode_tokens / steps,
            "prefill_tokens_per_step": self.prefill_tokens / steps,
            "step_ms": 1e3 * self.busy_s / steps,
            "overhead_ms": 1e3 * (self.busy_s - self.run_s) / steps,
            "preemptions": self.preemptions,
            "failed_steps": self.failed_steps,
            "pages_used_max": max((record.pages_used for record in self.records), default=0),
        }


class MetricsCollector:
    """Collects records and makes snapshots.

    Args:
        spans: what ran where; whoever computes adds to it.
    """

    def __init__(self, spans: SpanLog) -> None:
        self.spans = spans
        self.reset()

    def reset(self) -> None:
        """Forgets everything so far, for example a warm-up."""
        self._records: deque[StepRecord] = deque(maxlen=MAX_RECORDS)
        self._sums = dict.fromkeys(_SUMS, 0)
        self._finished: dict[str, int] = {}
        self.spans.clear()

    def add(self, record: StepRecord) -> None:
        """Notes a step."""
        self._records.append(record)
        sums = self._sums
        sums["steps"] += 1
        sums["decode_tokens"] += record.decode_tokens
        sums["prefill_tokens"] += record.prefill_tokens
        sums["prefix_tokens"] += record.prefix_tokens
        sums["preemptions"] += record.preemptions
        sums["failed_steps"] += record.failed
        sums["busy_s"] += record.total_s
        sums["run_s"] += record.run_s

    def add_finished(self, reason: str) -> None:
        """Notes the end of a request."""
        self._finished[reason] = self._finished.get(reason, 0) + 1

    def snapshot(self, *, running: int, waiting: int, pages_used: int, num_pages: int) -> EngineMetrics:
        """Everything so far, with the given state of the moment."""
        return EngineMetrics(
            **self._sums,
            running=running,
            waiting=waiting,
            pages_used=pages_used,
            num_pages=num_pages,
            finished=dict(self._finished),
            records=tuple(self._records),
            spans=self.spans.all(),
        )
