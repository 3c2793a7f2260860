"""One point of the multiplex benchmark: decodes that never end, and prompts one after the other."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

from chunkc.bench.metrics import percentile
from chunkc.errors import ChunkcError

_SETTLE_TOKENS = 3  # of every decode, before anything counts
_QUEUE = 2  # prompts that wait or run at a time


@dataclass(frozen=True)
class Load:
    """What is served: so many requests that decode, each with so many tokens at the start, and the prompts."""

    decodes: int
    context: int
    prompt: int
    prompts: int


@dataclass(frozen=True)
class Point:
    """What one run of a row measured.

    Attributes:
        itl_p50_ms, itl_p99_ms, itl_max_ms: of the decodes, while prompts were served; None without decodes.
        prefill_tok_s: prompt tokens per second, over the same time; None without prompts.
        read_again_mb: megabytes of keys and values that prefill chunks read again, a prompt.
    """

    itl_p50_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    prefill_tok_s: float | None
    read_again_mb: float | None


def needed_tokens(load: Load, steps: int) -> int:
    """Tokens that the cache must hold where the decodes make at most ``steps`` steps."""
    return load.decodes * (load.context + steps) + _QUEUE * (load.prompt + 1)


def measure(engine: Any, load: Load, *, steps: int) -> Point:
    """Serves the load once with an idle engine, in the mode and with the budget that it has.

    Args:
        engine: a ``chunkc.Engine``.
        load: what to serve; without prompts, ``steps`` steps of the decodes are measured.
        steps: the decodes make at most so many.

    Raises:
        ChunkcError: the decodes would have ended before the prompts.
    """
    from chunkc import SamplingParams

    def add(length: int, seed: int, new: int) -> str:
        tokens = [(seed * 131 + position * 7919) % vocab for position in range(length)]
        return engine.add_request(tokens, SamplingParams(max_new_tokens=new, ignore_eos=True))

    vocab = engine.runner.vocab_size
    times: dict[str, list[float]] = {add(load.context, seed, steps): [] for seed in range(load.decodes)}
    queued: set[str] = set()
    try:
        while any(len(each) < _SETTLE_TOKENS for each in times.values()):
            _step(engine, times)
        engine.reset_metrics()
        for each in times.values():
            del each[:-1]
        seeds = itertools.count(1000)
        began = time.perf_counter()
        done, count = 0, 0
        while done < load.prompts:
            while count < load.prompts and len(queued) < _QUEUE:
                queued.add(add(load.prompt, next(seeds), 1))
                count += 1
            ended = _step(engine, times)
            if ended & set(times):
                raise ChunkcError("the decodes ended before the prompts; give fewer --prompts or smaller --budget")
            done += len(ended & queued)
            queued -= ended
        while not load.prompts and engine.metrics.steps < steps - _SETTLE_TOKENS - 2:
            _step(engine, times)
        seconds = time.perf_counter() - began
    finally:
        for name in (*times, *queued):
            engine.abort(name)
    gaps = [b - a for each in times.values() for a, b in itertools.pairwise(each)]
    metrics = engine.metrics
    return Point(
        itl_p50_ms=_ms(percentile(gaps, 0.5)),
        itl_p99_ms=_ms(percentile(gaps, 0.99)),
        itl_max_ms=_ms(max(gaps, default=None)),
        prefill_tok_s=load.prompts * load.prompt / seconds if load.prompts else None,
        read_again_mb=metrics.prefix_tokens * engine.runner.bytes_per_token / load.prompts / 1e6
        if load.prompts
        else None,
    )


def _step(engine: Any, times: dict[str, list[float]]) -> set[str]:
    """Runs a step and notes the decodes' tokens; the requests that ended."""
    events = engine.step()
    now = time.perf_counter()
    for event in events:
        if event.error is not None:
            raise ChunkcError(f"a request failed: {event.error}")
        if event.request_id in times:
            times[event.request_id].append(now)
    return {event.request_id for event in events if event.finished}


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds
