"""A stand-in for the engine: no model, 0.1 ms a token, tokens that can be told in advance."""

from __future__ import annotations

import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from chunkc.runtime.metrics import EngineMetrics
from chunkc.runtime.outputs import TokenEvent

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))  # the toy model


@dataclass
class FakeEngine:
    """Prefills `budget` tokens a step (all that wait where it is None) and decodes one token per request.

    The token after a request's i-th is ``len(prompt) + i``.
    """

    budget: int | None = 8
    multiplex: str = "off"
    waiting: deque[list] = field(default_factory=deque)  # [request id, prompt tokens still to do, prompt, params]
    running: dict[str, list] = field(default_factory=dict)  # request id -> [tokens made, prompt length, params]
    added: list[tuple] = field(default_factory=list)
    tokens_per_step: list[int] = field(default_factory=list)
    decode_tokens: int = 0
    prefill_tokens: int = 0

    @property
    def metrics(self) -> EngineMetrics:
        return EngineMetrics(len(self.tokens_per_step), self.decode_tokens, self.prefill_tokens)

    def reset_metrics(self) -> None:
        self.tokens_per_step.clear()
        self.decode_tokens = self.prefill_tokens = 0

    def add_request(self, prompt, sampling_params=None, *, request_id=None, arrival_time=None) -> str:
        name = request_id or f"r{len(self.added)}"
        self.added.append((name, prompt, sampling_params, arrival_time))
        self.waiting.append([name, len(prompt), len(prompt), sampling_params])
        return name

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[TokenEvent]:
        assert self.has_unfinished(), "a step without work"
        events = [self._emit(name) for name in list(self.running)]
        left = float("inf") if self.budget is None else self.budget - len(events)
        total = decodes = len(events)
        while self.waiting and left > 0:
            entry = self.waiting[0]
            chunk = min(entry[1], left)
            entry[1] -= chunk
            left -= chunk
            total += chunk
            if entry[1]:
                break
            name, _, length, params = self.waiting.popleft()
            self.running[name] = [0, length, params]
            events.append(self._emit(name))
        self.tokens_per_step.append(int(total))
        self.prefill_tokens += int(total) - decodes
        self.decode_tokens += decodes
        time.sleep(1e-4 * total)
        return events

    def _emit(self, name: str) -> TokenEvent:
        made, length, params = self.running[name]
        self.running[name][0] += 1
        finished = made + 1 == params.max_new_tokens
        if finished:
            del self.running[name]
        return TokenEvent(name, length + made, made, finished=finished)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
