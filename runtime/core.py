"""The step: schedule, pack, run, sample, hand out.

No locks and no user input here: ``Engine`` sees to both. What happens to one request (bad logits, a failing
tokenizer, an abort) ends that request and no other; an error of the model ends the requests of that step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chunkc.errors import InvalidRequestError
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.detokenize import Detokenizer
from chunkc.runtime.metrics import MetricsCollector, StepRecord
from chunkc.runtime.outputs import Completion, FinishReason, TokenEvent
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request
from chunkc.runtime.sampling import Sampled, Sampler
from chunkc.runtime.scheduler import Scheduler
from chunkc.runtime.streams import EventSink

if TYPE_CHECKING:
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
    """What the model gave for one step, or the error it raised; ``ran`` is when."""

    ran: float
    sampled: Sampled | None = None
    error: Exception | None = None


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
    ) -> None:
        self._runner, self._scheduler, self._pool = runner, scheduler, pool
        self._tokenizer, self._clock = tokenizer, clock
        self._sampler = Sampler()
        self.metrics = MetricsCollector()
        self.live: dict[str, LiveRequest] = {}
        self.completions: OrderedDict[str, Completion] = OrderedDict()
        self.buffered: list[TokenEvent] = []
        self.late_aborts: deque[str] = deque()
        self.in_step = False

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
            self._step()
        finally:
            self.in_step = False

    def _step(self) -> None:
        began = self._clock()
        plan = self._scheduler.schedule()
        chunks = plan.chunks
        if not chunks:
            raise RuntimeError(f"a step with nothing to compute, {len(self.live)} requests unfinished")
        planned = self._clock()
        pages_used, waiting = self._pool.num_used, len(self._scheduler.waiting)
        for chunk in chunks:
            if chunk.request.metrics.first_scheduled is None:
                chunk.request.metrics.first_scheduled = began

        samplers = [chunk.request for chunk in chunks if chunk.samples]
        outcome = self._run(chunks, samplers)
        # What was aborted meanwhile gets no token any more.
        self._do_late_aborts()
        if outcome.error is not None:
            message = f"the step failed with {type(outcome.error).__name__}: {outcome.error}"
            for chunk in chunks:
                self._fail(chunk.request, message, outcome.error)
        else:
            self._scheduler.commit(plan)
            if outcome.sampled is not None:
                self._hand_out(samplers, outcome.sampled)

        self.metrics.add(
            StepRecord(
                step=plan.step,
                start=began,
                schedule_s=planned - began,
                run_s=outcome.ran - planned,
                total_s=self._clock() - began,
                budget=plan.budget,
                decode_tokens=plan.num_decode_tokens,
                prefill_tokens=plan.num_prefill_tokens,
                requests=len(chunks),
                waiting=waiting,
                pages_used=pages_used,
                preemptions=len(plan.preempted),
                failed=outcome.error is not None,
            )
        )

    def _run(self, chunks: list[Chunk], samplers: list[Request]) -> _Outcome:
        outcome = _Outcome(ran=self._clock())
        try:
            logits = self._runner.run(pack(chunks, self._pool))
            outcome.ran = self._clock()
            if samplers:
                outcome.sampled = self._sampler.sample(logits, samplers)
        except Exception as error:
            outcome.error, outcome.ran = error, self._clock()
        return outcome

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
        return completion
