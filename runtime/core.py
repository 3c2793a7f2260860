"""The step: schedule, pack, run, sample, hand out.

Where prefill is computed apart from the decodes (``multiplex.py``), the step's batch is the decodes, and a
``PrefillCursor`` goes on beside them over several steps. When it has come to its end its tokens count as computed and
its requests get their first token: they *join*.

No locks and no user input here: ``Engine`` sees to both. What happens to one request (bad logits, a failing
tokenizer, an abort) ends that request and no other; an error of the model ends the requests of that step.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from chunkc.errors import InvalidRequestError
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.cursor import PrefillCursor
from chunkc.runtime.detokenize import Detokenizer
from chunkc.runtime.executors import Executor
from chunkc.runtime.metrics import MetricsCollector, StepRecord
from chunkc.runtime.modes import Modes
from chunkc.runtime.multiplex import Mode, StepView
from chunkc.runtime.outputs import Completion, FinishReason, TokenEvent
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request, RequestStatus
from chunkc.runtime.sampling import Sampled, Sampler
from chunkc.runtime.scheduler import Scheduler
from chunkc.runtime.spans import SpanLog
from chunkc.runtime.streams import EventSink
from chunkc.runtime.teams import release_team

if TYPE_CHECKING:
    from chunkc.runtime.deferred_logits import Logits
    from chunkc.runtime.runner import ModelRunner

KEPT_COMPLETIONS = 4096  # the latest completions stay available by request id


@dataclass(slots=True)
class LiveRequest:
    """An unfinished request and what goes with it."""

    request: Request
    detokenizer: Detokenizer | None
    sink: EventSink | None


@dataclass(slots=True)
class _Outcome:
    """What the model gave for one step's batch, or the error it raised; ``ran`` is when."""

    ran: float
    sampled: Sampled | None = None
    error: Exception | None = None


@dataclass(slots=True)
class _Joined:
    """What the prefills that ended in a step contributed to it."""

    tokens: int = 0
    prefix_tokens: int = 0
    failed: bool = False


class EngineCore:
    """The unfinished requests and one step after another.

    Attributes:
        live: unfinished requests by id.
        completions: the latest finished ones by id.
        buffered: events of requests without a sink that nobody has fetched yet.
        late_aborts: ids of requests to end as soon as no step is running.
        in_step: whether a step is running.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        pool: PagePool,
        tokenizer: Any,
        clock: Callable[[], float],
        modes: Modes,
        spans: SpanLog,
    ) -> None:
        self._runner, self._scheduler, self._pool = runner, scheduler, pool
        self._tokenizer, self._clock = tokenizer, clock
        self._modes = modes
        self._cursor: PrefillCursor | None = None
        scheduler.stop_apart = self._drop_cursor
        self._sampler = Sampler()
        self.metrics = MetricsCollector(spans)
        self.live: dict[str, LiveRequest] = {}
        self.completions: OrderedDict[str, Completion] = OrderedDict()
        self.buffered: list[TokenEvent] = []
        self.late_aborts: deque[str] = deque()
        self.in_step = False
        self._stepper: int | None = None

    def is_known(self, request_id: str) -> bool:
        """Whether a request of that name is unfinished or still available."""
        return request_id in self.live or request_id in self.completions

    def enqueue(self, requests: list[Request], sink: EventSink | None) -> None:
        """Puts requests into the queue, all or none.

        Raises:
            InvalidRequestError: an unfinished request has the same id.
        """
        for request in requests:
            if request.request_id in self.live:
                raise InvalidRequestError(
                    f"there is an unfinished request {request.request_id!r} already; choose another id",
                    request_id=request.request_id,
                )
        for request in requests:
            detokenizer = None
            if self._tokenizer is not None:
                detokenizer = Detokenizer(self._tokenizer, request.sampling.stop_strings)
            self.live[request.request_id] = LiveRequest(request, detokenizer, sink)
            self._scheduler.add(request)

    def abort(self, request_id: str) -> Completion | None:
        """Ends a request and drops its events; later, if a step is running."""
        if self.in_step:
            self.late_aborts.append(request_id)
            return None
        return self._abort_now(request_id)

    def settle(self) -> None:
        """Ends the requests whose abort had to wait, unless a step is running still."""
        if not self.in_step:
            self._do_late_aborts()

    def iterate(self) -> None:
        """Runs one step, if a request is unfinished."""
        if self.in_step:
            raise RuntimeError("a step was started from inside a step")
        self._do_late_aborts()
        if not self.live:
            return
        self.in_step = True
        try:
            with self._modes.machine.active():
                self._step()
        finally:
            self.in_step = False
            me, before = threading.get_ident(), self._stepper
            self._stepper = me
            if not self.live or before not in (None, me):
                release_team()  # whoever steps next may be another thread

    def _step(self) -> None:
        began = self._clock()
        # What cannot run here is said to whoever steps, before anything is planned.
        mode = self._modes.choose(self._view())
        executor = self._modes.executor(mode)
        apart = mode != "off"
        # One cursor at a time: while it is under way no other prompt is taken apart.
        plan = self._scheduler.schedule(apart=apart, prefill=not (apart and self._cursor is not None))
        chunks = plan.batch
        if plan.apart and plan.prefills:
            self._start_apart(list(plan.prefills.values()), mode, plan.budget, len(chunks))
        cursor = self._cursor
        if not chunks and cursor is None:
            raise RuntimeError(f"a step with nothing to compute, {len(self.live)} requests unfinished")
        planned = self._clock()
        pages_used, waiting = self._pool.num_used, len(self._scheduler.waiting)
        for chunk in (*chunks, *(plan.prefills.values() if plan.apart else ())):
            if chunk.request.metrics.first_scheduled is None:
                chunk.request.metrics.first_scheduled = began

        samplers = [chunk.request for chunk in chunks if chunk.samples]
        work = None if plan.budget is None else max(1, plan.budget - sum(chunk.num_tokens for chunk in chunks))
        outcome = self._run(chunks, samplers, cursor, work, executor)
        # What was aborted meanwhile gets no token any more.
        self._do_late_aborts()
        if outcome.error is not None:
            message = f"the step failed with {type(outcome.error).__name__}: {outcome.error}"
            # Without a batch it can only be the prefill's.
            requests = [chunk.request for chunk in chunks] or (cursor.requests if cursor is not None else [])
            for request in requests:
                self._fail(request, message, outcome.error)
        else:
            self._scheduler.commit(chunks)
            if outcome.sampled is not None:
                self._hand_out(samplers, outcome.sampled)
        joined = self._join() if self._cursor is not None and self._cursor.done else _Joined()

        together = plan.num_prefill_tokens if not plan.apart else 0
        self.metrics.add(
            StepRecord(
                step=plan.step,
                start=began,
                schedule_s=planned - began,
                run_s=outcome.ran - planned,
                total_s=self._clock() - began,
                budget=plan.budget,
                decode_tokens=plan.num_decode_tokens,
                prefill_tokens=together + joined.tokens,
                requests=len(chunks),
                waiting=waiting,
                pages_used=pages_used,
                preemptions=len(plan.preempted),
                failed=outcome.error is not None or joined.failed,
                mode=mode,
                apart=cursor is not None,
                prefix_tokens=joined.prefix_tokens + sum(chunk.start for chunk in chunks[plan.num_decode_tokens :]),
            )
        )

    def _view(self) -> StepView:
        running = self._scheduler.running
        prefills = [request for request in running if not request.is_decoding]
        return StepView(
            decodes=len(running) - len(prefills),
            prefill_tokens=sum(request.num_remaining for request in prefills),
            waiting=len(self._scheduler.waiting),
            apart=self._cursor is not None,
            contention=self._modes.contention,
        )

    def _run(
        self,
        chunks: list[Chunk],
        samplers: list[Request],
        cursor: PrefillCursor | None,
        work: float | None,
        executor: Executor,
    ) -> _Outcome:
        outcome = _Outcome(ran=self._clock())

        def use(logits: Logits) -> Sampled | None:
            wanted = self._sampler.wanted(logits, samplers) if samplers else None
            outcome.ran = self._clock()
            return None if wanted is None else self._sampler.sample(wanted, samplers)

        try:
            batch = pack(chunks, self._pool) if chunks else None
            outcome.sampled = executor.run(batch, use, cursor, work)
            if cursor is not None:
                outcome.ran = self._clock()
        except Exception as error:
            outcome.error, outcome.ran = error, self._clock()
        return outcome

    # ---- prefill apart from the batch -------------------------------------------------------------------

    def _start_apart(self, chunks: list[Chunk], mode: Mode, budget: int | None, decodes: int) -> None:
        """Makes a cursor of these chunks. By layers, a part for a piece is at most what a step may do beside its
        decodes; by tokens, a piece is at most the budget."""
        limit: float | None = budget
        if budget is not None and mode == "layers":
            limit = max(1, budget - decodes) * self._runner.num_parts
        order = "layers" if mode == "layers" else "tokens"
        self._cursor = PrefillCursor(self._runner, self._pool, chunks, order=order, piece_limit=limit)
        for request in self._cursor.requests:
            request.is_apart = True

    def _join(self) -> _Joined:
        """The cursor is done: what it computed is in the cache, and its requests get their first tokens."""
        cursor, joined = self._cursor, _Joined()
        assert cursor is not None
        self._close_cursor()
        if cursor.error is not None:
            joined.failed = True
            message = f"the prefill failed with {type(cursor.error).__name__}: {cursor.error}"
            for request in cursor.requests:
                self._fail(request, message, cursor.error)
            return joined
        self._scheduler.commit(chunk for chunk in cursor.chunks if chunk.request.status is RequestStatus.RUNNING)
        joined.tokens = sum(chunk.num_tokens for chunk in cursor.chunks)
        joined.prefix_tokens = sum(piece.prefix_tokens for piece in cursor.pieces)
        for piece in cursor.pieces:
            if samplers := piece.samplers:
                assert piece.logits is not None
                try:
                    sampled = self._modes.compute(partial(self._first_tokens, piece.logits, samplers))
                except Exception as error:
                    joined.failed = True
                    message = f"the step failed with {type(error).__name__}: {error}"
                    for request in samplers:
                        self._fail(request, message, error)
                else:
                    self._hand_out(samplers, sampled)
        return joined

    def _first_tokens(self, logits: Logits, samplers: list[Request]) -> Sampled:
        return self._sampler.sample(self._sampler.wanted(logits, samplers), samplers)

    def _drop_cursor(self) -> None:
        """Stops the prefill that is under way and forgets what it has computed; its requests keep their pages."""
        if self._cursor is not None:
            self._close_cursor()

    def _close_cursor(self) -> None:
        assert self._cursor is not None
        self._modes.settle()  # what uses its pages and its logits next comes behind its last part
        for request in self._cursor.requests:
            request.is_apart = False
        self._cursor.close()
        self._cursor = None

    def _hand_out(self, samplers: list[Request], sampled: Sampled) -> None:
        now = self._clock()
        bad = set(sampled.bad_rows)
        for row, (request, token) in enumerate(zip(samplers, sampled.token_ids, strict=True)):
            live = self.live.get(request.request_id)
            if live is None or live.request is not request:
                continue
            if row in bad:
                self._fail(request, f"the model's logits for token {request.num_generated} are not finite")
            else:
                self._accept(live, token, now)

    def _accept(self, live: LiveRequest, token: int, now: float) -> None:
        """Adds a token to a request, ends the request if it is the last."""
        request, detokenizer = live.request, live.detokenizer
        request.append(token)
        request.metrics.token_times.append(now)
        if request.metrics.first_token is None:
            request.metrics.first_token = now
        text = ""
        reason: FinishReason | None = None
        try:
            if detokenizer is not None:
                text = detokenizer.add(token)
            if token in request.sampling.eos_token_ids or (detokenizer is not None and detokenizer.stopped):
                reason = "stop"
            elif request.is_full:
                reason = "length"
            if reason is not None and detokenizer is not None:
                text += detokenizer.finish()
        except Exception as error:
            self._fail(request, f"the tokenizer failed with {type(error).__name__}: {error}", error)
            return
        index = request.num_generated - 1
        self._emit(live, TokenEvent(request.request_id, token, index, text, reason is not None, reason))
        if reason is not None:
            self._finish(live, reason)

    def _fail(self, request: Request, message: str, cause: Exception | None = None) -> None:
        live = self.live.get(request.request_id)
        if live is None or live.request is not request:
            return
        request.error, request.cause = message, cause
        index = request.num_generated
        self._emit(live, TokenEvent(request.request_id, None, index, "", True, "error", error=message))
        self._finish(live, "error")

    def _do_late_aborts(self) -> None:
        while self.late_aborts:
            self._abort_now(self.late_aborts.popleft())

    def _abort_now(self, request_id: str) -> Completion | None:
        # Also for a request that has ended and whose events nobody has fetched: after an abort none follows.
        if self.buffered:
            self.buffered = [event for event in self.buffered if event.request_id != request_id]
        live = self.live.get(request_id)
        return None if live is None else self._finish(live, "abort")

    def _emit(self, live: LiveRequest, event: TokenEvent) -> None:
        if live.sink is not None:
            live.sink.put(event)
        else:
            self.buffered.append(event)

    def _finish(self, live: LiveRequest, reason: FinishReason) -> Completion:
        request = live.request
        self._scheduler.remove(request)
        request.metrics.finished = self._clock()
        completion = Completion(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids(),
            token_ids=request.generated_token_ids(),
            text="" if live.detokenizer is None else live.detokenizer.text,
            finish_reason=reason,
            metrics=request.metrics,
            error=request.error,
        )
        del self.live[request.request_id]
        self.completions.pop(request.request_id, None)
        self.completions[request.request_id] = completion
        if len(self.completions) > KEPT_COMPLETIONS:
            self.completions.popitem(last=False)
        self.metrics.add_finished(reason)
        if live.sink is not None:
            live.sink.close(completion)
        if self._cursor is not None and not any(r.status is RequestStatus.RUNNING for r in self._cursor.requests):
            self._drop_cursor()
        return completion
