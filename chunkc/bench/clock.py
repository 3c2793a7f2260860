"""Serve a workload on the wall clock and note when each token came out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from chunkc.bench.workload import Workload


class ServingEngine(Protocol):
    """What the benchmark uses of ``chunkc.Engine``."""

    budget: int | None

    @property
    def metrics(self) -> Any: ...  # sums since the start: steps, decode_tokens, prefill_tokens

    def add_request(self, prompt: Any, sampling_params: Any = None, *, arrival_time: float | None = None) -> str: ...

    def step(self) -> list[Any]: ...

    def has_unfinished(self) -> bool: ...


@dataclass
class Trace:
    """What one run did. Times are seconds since the run's start.

    Attributes:
        times: per request of the workload, when each of its tokens came out.
        tokens: per request, the tokens.
        steps: iterations of the engine; None where the system under test does not count them.
        decode_tokens, prefill_tokens: what these iterations computed, in all.
    """

    times: list[list[float]]
    tokens: list[list[int]]
    steps: int | None = None
    decode_tokens: int = 0
    prefill_tokens: int = 0
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def for_workload(cls, workload: Workload) -> Trace:
        return cls(times=[[] for _ in workload.requests], tokens=[[] for _ in workload.requests])

    def now(self) -> float:
        return time.perf_counter() - self.started

    def note(self, request: int, token: int, at: float) -> None:
        self.times[request].append(at)
        self.tokens[request].append(token)


def serve(engine: ServingEngine, workload: Workload) -> Trace:
    """Serve `workload` with `engine`, adding each request when its time has come.

    A request is added between two steps, as a server would do it, but its latency counts from its arrival. A
    token's time is the end of the step that made it.
    """
    from chunkc import SamplingParams

    trace = Trace.for_workload(workload)
    requests = workload.requests
    index_of: dict[str, int] = {}
    added = 0
    before = engine.metrics
    while added < len(requests) or engine.has_unfinished():
        while added < len(requests) and requests[added].arrival_s <= trace.now():
            request = requests[added]
            params = SamplingParams(max_new_tokens=request.max_new_tokens, do_sample=False, ignore_eos=True)
            request_id = engine.add_request(
                list(request.prompt_token_ids), params, arrival_time=trace.started + request.arrival_s
            )
            index_of[request_id] = added
            added += 1
        if not engine.has_unfinished():
            time.sleep(max(0.0, requests[added].arrival_s - trace.now()))
            continue
        events = engine.step()
        at = trace.now()
        for event in events:
            request_index = index_of[event.request_id]
            if event.error is not None:
                raise RuntimeError(f"request {request_index} of workload {workload.name!r} failed: {event.error}")
            trace.note(request_index, event.token_id, at)
    after = engine.metrics
    trace.steps = after.steps - before.steps
    trace.decode_tokens = after.decode_tokens - before.decode_tokens
    trace.prefill_tokens = after.prefill_tokens - before.prefill_tokens
    return trace


class _TokenTimes:
    """A streamer for ``model.generate``: receives the prompt once, then every token as it is made."""

    def __init__(self, trace: Trace, request: int) -> None:
        self._trace, self._request, self._prompt_seen = trace, request, False

    def put(self, value: Any) -> None:
        if self._prompt_seen:
            self._trace.note(self._request, int(value), self._trace.now())
        self._prompt_seen = True

    def end(self) -> None:
        pass


def generate_one_by_one(model: Any, workload: Workload) -> Trace:
    """Serve `workload` with HuggingFace's own ``generate``, one request after another by arrival."""
    import torch

    trace = Trace.for_workload(workload)
    with torch.inference_mode(), _no_end_of_sequence(model):
        for i, request in enumerate(workload.requests):
            time.sleep(max(0.0, request.arrival_s - trace.now()))
            ids = torch.tensor([request.prompt_token_ids])
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=request.max_new_tokens,
                streamer=_TokenTimes(trace, i),
            )
    return trace


@contextmanager
def _no_end_of_sequence(model: Any) -> Iterator[None]:
    """Let ``generate`` run past end-of-sequence tokens; the model's generation config is put back afterwards.

    ``generate(eos_token_id=None)`` would not do it: None means "as in the model's generation config" there.
    """
    config = model.generation_config
    saved = config.eos_token_id, config.pad_token_id
    config.eos_token_id = None
    if config.pad_token_id is None:
        config.pad_token_id = 0  # never used in a batch of one, but generate() asks for it
    try:
        yield
    finally:
        config.eos_token_id, config.pad_token_id = saved
