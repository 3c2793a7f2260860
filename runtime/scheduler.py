"""Which tokens the next step computes.

A step has a budget of tokens, decodes and prefill chunks together. It is filled in this order:

1. every running decode, one token each;
2. prefill chunks, of several requests, in the order of the policy (by arrival), as long as budget is left;
   a waiting request is admitted when its turn comes and its pages are there.

A step never waits to become full. Prefills can also be planned *apart*: then no chunk joins the decodes, and whole
prompts, one after another until together they have the budget's tokens, are taken out for a ``PrefillCursor``.

The rules about pages, which together exclude that requests wait for each
other or evict each other for ever:

- Pages are taken chunk by chunk. A request is admitted only if the pages for all its tokens are free beyond
  those that the admitted prefills still need.
- A request that needs a page when none is free evicts the youngest running request that is younger than
  itself; if there is none, it keeps what it has and sits out the step. So the oldest can always go on, it
  fits (the engine refuses requests larger than the cache), and when it ends the next one is the oldest.
- The pages of a prefill that is under way apart are in use; whoever evicts it has it stopped first.
- An evicted request waits again, at its old place in the order of arrival. Its evictor took at least one of
  its pages, so it cannot come back before somebody has given pages back; a step that evicts admits nobody.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from chunkc.runtime.batch import Chunk
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request, RequestStatus


class PrefillPolicy(Protocol):
    """In which order prompts get what the decodes leave of the budget."""

    def order(self, prefills: Sequence[Request], waiting: Sequence[Request]) -> Iterable[Request]:
        """All or some of the requests, first served first.

        The first waiting request that cannot be admitted ends admissions for the step, so a policy decides
        who is *next*; it cannot let later requests slip past one that needs many pages.

        Args:
            prefills: admitted requests that have not finished their prefill, by arrival.
            waiting: requests that are not admitted, by arrival.
        """
        ...


class ArrivalOrder:
    """First come, first served."""

    def order(self, prefills: Sequence[Request], waiting: Sequence[Request]) -> Iterable[Request]:
        """Admitted prefills, then the queue; each by arrival."""
        return [*prefills, *waiting]


@dataclass
class Schedule:
    """What one step computes.

    Attributes:
        step: number of the step.
        budget: its token budget, None if unlimited.
        decodes: one-token chunks of running decodes, by request id.
        prefills: chunks of prefills, by request id, in the order served.
        apart: whether the prefills are computed apart from the decodes.
        preempted: requests that lost their pages while the step was planned.
    """

    step: int
    budget: int | None
    decodes: dict[str, Chunk] = field(default_factory=dict)
    prefills: dict[str, Chunk] = field(default_factory=dict)
    apart: bool = False
    preempted: list[Request] = field(default_factory=list)

    @property
    def batch(self) -> list[Chunk]:
        """What is computed together: decodes first, then the prefills that are not apart."""
        return [*self.decodes.values(), *(() if self.apart else self.prefills.values())]

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of running decodes."""
        return len(self.decodes)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of prefill chunks."""
        return sum(chunk.num_tokens for chunk in self.prefills.values())

    def room(self, want: int) -> int:
        """How many of ``want`` more tokens the budget allows; never negative."""
        if self.budget is None:
            return want
        if self.apart:  # whole prompts, until there are enough
            return want if self.num_prefill_tokens < self.budget else 0
        used = self.num_decode_tokens + self.num_prefill_tokens
        return max(0, min(want, self.budget - used))

    def drop(self, request: Request) -> None:
        """Takes an evicted request out of the step; its tokens are free for others."""
        self.decodes.pop(request.request_id, None)
        self.prefills.pop(request.request_id, None)


class Scheduler:
    """Owns the queue and the running requests; plans one step at a time.

    Args:
        pool: the pages.
        budget: tokens per step; None computes every prompt in one piece. May be set between steps.
        max_requests: requests that may run at the same time.
        policy: order of prefills.
        stop_apart: called before a prefill that is under way apart loses its pages. When it returns, none is.

    Attributes:
        waiting: requests without pages, by arrival.
        running: requests with pages, by arrival.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        budget: int | None,
        max_requests: int,
        policy: PrefillPolicy | None = None,
        stop_apart: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool, self.budget, self.max_requests = pool, budget, max_requests
        self.stop_apart = stop_apart
        self.policy = policy if policy is not None else ArrivalOrder()
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self._step = 0
        self._services = itertools.count()

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    def add(self, request: Request) -> None:
        """Puts a request into the queue, at its place in the order of arrival."""
        insort(self.waiting, request, key=_arrival)

    def remove(self, request: Request) -> None:
        """Takes a request out for good and gives its pages back. Not while a step is being computed."""
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
            self._release(request)
        elif request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED

    def schedule(self, *, apart: bool = False, prefill: bool = True) -> Schedule:
        """Plans the next step: takes the pages it needs, computes nothing.

        Not empty as long as a request is unfinished, if prefills are planned or one is under way apart. A step that
        fails needs no undo: requests advance only in ``commit``, until then the next plan is for the same tokens.

        Args:
            apart: plan prefills to be computed apart, see ``Schedule``.
            prefill: whether to plan any.
        """
        plan = Schedule(self._step, self.budget)
        self._step += 1
        decodes = [request for request in self.running if request.is_decoding]
        self._serve_decodes(plan, decodes)
        if prefill:
            plan.apart = apart
            self._serve_prefills(plan, [r for r in self.running if not r.is_decoding and not r.is_apart])
        return plan

    def commit(self, chunks: Iterable[Chunk]) -> None:
        """Notes that tokens are now in the cache."""
        for chunk in chunks:
            chunk.request.num_computed = chunk.end
            chunk.request.last_served = next(self._services)

    def _serve_decodes(self, plan: Schedule, decodes: list[Request]) -> None:
        if plan.room(len(decodes)) < len(decodes):
            # More decodes than budget: whoever waited longest for a token goes first, so that all take turns.
            decodes.sort(key=lambda request: request.last_served)
        for request in decodes:
            if plan.room(1) == 0:
                return
            # Serving an older request may just have evicted this one.
            if request.status is RequestStatus.RUNNING and self._take_pages(plan, request, want=1):
                start = request.num_computed
                plan.decodes[request.request_id] = Chunk(request, start, start + 1)

    def _serve_prefills(self, plan: Schedule, prefills: list[Request]) -> None:
        if plan.room(1) == 0 or not (prefills or self.waiting):
            return
        for request in list(self.policy.order(prefills, self.waiting)):
            want = plan.room(request.num_remaining)
            if want == 0:
                return
            if request.status is RequestStatus.WAITING:
                # Also true for a prefill that this step has evicted.
                if plan.preempted or not self._can_admit(request):
                    return
                self._admit(request)
            count = self._take_pages(plan, request, want)
            if count:
                start = request.num_computed
                plan.prefills[request.request_id] = Chunk(request, start, start + count)

    def _can_admit(self, request: Request) -> bool:
        if len(self.running) >= self.max_requests or not self.pool.has_free_row:
            return False
        promised = sum(
            self.pool.pages_for(other.num_tokens) - self.pool.num_held(other.row)
            for other in self.running
            if not other.is_decoding
        )
        # With nothing else running this is always true: the engine refuses what does not fit alone.
        return self.pool.pages_for(request.num_tokens) <= self.pool.num_free - promised

    def _admit(self, request: Request) -> None:
        self.waiting.remove(request)
        request.row = self.pool.open_row()
        request.status = RequestStatus.RUNNING
        request.prefill_end = request.num_tokens
        insort(self.running, request, key=_arrival)

    def _take_pages(self, plan: Schedule, request: Request, want: int) -> int:
        """Makes room in the cache for up to ``want`` more tokens of a request.

        Returns:
            How many tokens there is room for, 0 if the request has to sit out this step. Others are evicted
            only where it would otherwise be 0: a shorter chunk is cheaper than computing theirs again.
        """
        pool, row, computed = self.pool, request.row, request.num_computed
        missing = pool.pages_for(computed + want) - pool.num_held(row)
        if missing <= 0:
            return want
        if pool.num_free == 0 and pool.capacity(row) == computed:
            self._evict_for(plan, request)
        granted = min(missing, pool.num_free)
        pool.extend(row, granted)
        return min(want, pool.capacity(row) - computed)

    def _evict_for(self, plan: Schedule, request: Request) -> None:
        victim = self.running[-1]
        if victim.order <= request.order:
            return
        if victim.is_apart:
            self.stop_apart()
        plan.drop(victim)
        plan.preempted.append(victim)
        self.running.pop()
        self._release(victim)
        victim.status = RequestStatus.WAITING
        victim.metrics.num_preemptions += 1
        insort(self.waiting, victim, key=_arrival)

    def _release(self, request: Request) -> None:
        self.pool.close_row(request.row)
        request.row = -1
        request.num_computed = 0


def _arrival(request: Request) -> int:
    return request.order
