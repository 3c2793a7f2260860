"""One request: its tokens, and how far its computation has come."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np

from chunkc.config import ResolvedSampling
from chunkc.runtime.outputs import RequestMetrics


class RequestStatus(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # holds no pages: not admitted yet, or preempted
    RUNNING = "running"  # holds a row of the page table; prefilling or decoding
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """A request from its arrival to its end.

    All tokens, prompt and generated, lie in one buffer. ``num_computed`` of them are in the cache; what
    remains is what the next steps have to process::

        tokens   p p p p p p p g g            p: prompt, g: generated
                 `-computed-'  `remaining: a decode has exactly one, a prefill any number

    Preemption gives the pages back and sets ``num_computed`` to 0; the tokens stay, so the request later
    prefills prompt and generated tokens alike and goes on where it was.

    Attributes:
        order: place in the order of arrival; smaller is older. Decides priority.
        tokens: int64 ``[num_prompt + max_new_tokens]``, valid up to ``num_tokens``.
        prefill_end: number of tokens when last admitted; from there on the request decodes.
        row: its row in the page table, -1 while it holds none.
        is_apart: whether a ``PrefillCursor`` computes its prompt, so that no batch does.
        last_served: a number that is larger the later a chunk of it was last computed; -1 before the first.
    """

    request_id: str
    order: int
    tokens: np.ndarray
    num_prompt: int
    sampling: ResolvedSampling
    metrics: RequestMetrics
    num_tokens: int
    num_computed: int = 0
    prefill_end: int = 0
    row: int = -1
    is_apart: bool = False
    last_served: int = -1
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: str | None = None
    error: str | None = None
    cause: BaseException | None = field(default=None, repr=False)

    @classmethod
    def create(
        cls,
        request_id: str,
        order: int,
        prompt: np.ndarray,
        sampling: ResolvedSampling,
        metrics: RequestMetrics,
    ) -> Request:
        """A waiting request; ``prompt`` is int64 ``[n]``, n >= 1, and is copied."""
        tokens = np.empty(len(prompt) + sampling.max_new_tokens, dtype=np.int64)
        tokens[: len(prompt)] = prompt
        return cls(request_id, order, tokens, len(prompt), sampling, metrics, num_tokens=len(prompt))

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens that are known and not yet in the cache; at least 1 until the request has finished."""
        return self.num_tokens - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether it runs and has left its prefill behind: each step computes its newest token."""
        return self.status is RequestStatus.RUNNING and self.num_computed >= self.prefill_end

    @property
    def is_full(self) -> bool:
        """Whether it has generated all the tokens it may."""
        return self.num_tokens == len(self.tokens)

    def append(self, token: int) -> None:
        """Adds a generated token."""
        self.tokens[self.num_tokens] = token
        self.num_tokens += 1

    def prompt_token_ids(self) -> list[int]:
        """The prompt."""
        return self.tokens[: self.num_prompt].tolist()

    def generated_token_ids(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.num_prompt : self.num_tokens].tolist()
