"""From a run's token times to its figures, and from several runs to medians and their spread."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chunkc.bench.clock import Trace
from chunkc.bench.workload import Workload


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """The percentile by linear interpolation, as NumPy does by default; None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = (len(ordered) - 1) * fraction
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class RunResult:
    """The figures of one run of one configuration.

    TTFT is from a request's arrival to its first token, ITL between two tokens of a request. ``dec_`` figures
    are of the requests that were there from the start, ``long_`` of those that arrived later; None where
    there are not both. `budget` is None for whole prefill and for HuggingFace's generate. `peak_rss_mb` is
    the peak of the whole process so far, its children included. `steps` are iterations of the engine, and the
    two figures after it the mean number of decode and prefill tokens in one.
    """

    config: str
    workload: str
    dtype: str
    budget: int | None
    run: int
    wall_s: float
    prompt_tok_s: float
    output_tok_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    dec_itl_p50_ms: float | None
    dec_itl_p99_ms: float | None
    long_ttft_p50_ms: float | None
    peak_rss_mb: int
    compile_s: float | None
    tokens: list[list[int]]
    steps: int | None
    decode_per_step: float | None
    prefill_per_step: float | None

    def to_json(self) -> dict[str, Any]:
        """The object that ``--json`` writes for this run: every figure but those of the steps."""
        steps = ("steps", "decode_per_step", "prefill_per_step")
        return {name: value for name, value in asdict(self).items() if name not in steps}


def measure(
    trace: Trace,
    workload: Workload,
    *,
    config: str,
    dtype: str,
    budget: int | None,
    run: int,
    compile_s: float | None,
) -> RunResult:
    """The figures of one run.

    Raises:
        RuntimeError: a request did not get all of its tokens.
    """
    for i, (request, tokens) in enumerate(zip(workload.requests, trace.tokens, strict=True)):
        if len(tokens) != request.max_new_tokens:
            raise RuntimeError(
                f"{config}: request {i} of workload {workload.name!r} got {len(tokens)} tokens "
                f"in place of {request.max_new_tokens}"
            )
    wall = max(times[-1] for times in trace.times)
    arrivals = [request.arrival_s for request in workload.requests]
    ttft = [times[0] - arrival for times, arrival in zip(trace.times, arrivals, strict=True)]
    gaps = [[b - a for a, b in itertools.pairwise(times)] for times in trace.times]
    all_gaps = [gap for of_request in gaps for gap in of_request]
    early_gaps: list[float] = []
    late_ttft: list[float] = []
    if workload.is_mixed:
        early_gaps = [gap for of_request, at in zip(gaps, arrivals, strict=True) if at == 0 for gap in of_request]
        late_ttft = [value for value, at in zip(ttft, arrivals, strict=True) if at > 0]
    return RunResult(
        config=config,
        workload=workload.name,
        dtype=dtype,
        budget=budget,
        run=run,
        wall_s=round(wall, 3),
        prompt_tok_s=round(workload.prompt_tokens / wall, 1),
        output_tok_s=round(workload.new_tokens / wall, 1),
        ttft_p50_ms=_ms(percentile(ttft, 0.5)),
        ttft_p99_ms=_ms(percentile(ttft, 0.99)),
        itl_p50_ms=_ms(percentile(all_gaps, 0.5)),
        itl_p99_ms=_ms(percentile(all_gaps, 0.99)),
        itl_max_ms=_ms(max(all_gaps, default=None)),
        dec_itl_p50_ms=_ms(percentile(early_gaps, 0.5)),
        dec_itl_p99_ms=_ms(percentile(early_gaps, 0.99)),
        long_ttft_p50_ms=_ms(percentile(late_ttft, 0.5)),
        peak_rss_mb=peak_rss_mb(),
        compile_s=None if compile_s is None else round(compile_s, 2),
        tokens=trace.tokens,
        steps=trace.steps,
        decode_per_step=None if not trace.steps else round(trace.decode_tokens / trace.steps, 2),
        prefill_per_step=None if not trace.steps else round(trace.prefill_tokens / trace.steps, 2),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 1)


def peak_rss_mb() -> int:
    """Peak resident memory of this process and its living children, MiB, as the kernel counts it."""
    import psutil

    process = psutil.Process()
    peak = 0
    for each in (process, *process.children(recursive=True)):
        try:
            with open(f"/proc/{each.pid}/status") as status:
                peak += sum(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
        except OSError:  # not Linux, or the child has ended
            peak += each.memory_info().rss if each.is_running() else 0
    return round(peak / 2**20)


def median(results: Sequence[RunResult], figure: str) -> float | None:
    """The median of one figure over the runs of a configuration; None where the runs do not have it."""
    values = [getattr(result, figure) for result in results]
    return None if any(value is None for value in values) else statistics.median(values)


def spread(results: Sequence[RunResult], figure: str) -> float | None:
    """(largest - smallest) / median of one figure over the runs of a configuration."""
    values = [getattr(result, figure) for result in results]
    middle = median(results, figure)
    return None if not middle else (max(values) - min(values)) / middle


def first_difference(a: RunResult, b: RunResult) -> tuple[int, int] | None:
    """(request, token index) where the tokens of two runs of a workload first differ, or None."""
    for i, (left, right) in enumerate(zip(a.tokens, b.tokens, strict=True)):
        for j, (x, y) in enumerate(zip(left, right, strict=True)):
            if x != y:
                return i, j
    return None
