"""What the engine gives back: token events while a request runs, a completion at its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds on the engine's clock (``time.perf_counter``).

    Attributes:
        arrival: when it was added, or the ``arrival_time`` that was given.
        first_scheduled: when a step first worked on it.
        first_token: when its first token was ready.
        finished: when it ended, for whatever reason.
        token_times: when each token was ready.
        num_preemptions: how often it lost its pages and had to compute them again.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the first step that worked on it."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token, in seconds from arrival."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies: seconds between each token and the one before; one fewer than tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One new token of a request, or its end by an error.

    Attributes:
        token_id: the token; None in the event that reports an error.
        index: its place among the generated tokens, from 0.
        text: what this token adds to the text. Empty while a character or a possible stop string is not
            complete; what was held back comes with a later event.
        finished: whether it is the request's last event.
        finish_reason: why, in the last event.
        error: what went wrong, with ``finish_reason == "error"``.
    """

    request_id: str
    token_id: int | None
    index: int
    text: str = ""
    finished: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A request that has ended.

    Attributes:
        token_ids: the generated tokens, the end-of-sequence token included.
        text: the generated text without special tokens, cut before a stop string; empty without a tokenizer.
        finish_reason: ``"stop"`` (end-of-sequence token or stop string), ``"length"`` (``max_new_tokens``),
            ``"abort"`` or ``"error"``.
        error: what went wrong, with ``finish_reason == "error"``.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None
