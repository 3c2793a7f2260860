"""The engine: requests in, tokens out.

    add_request ──> queue ──schedule──> chunks ──pack──> batch ──runner.run──> logits ──sample──> events
                      ^                                                                   │
                      └───────────── not finished: decodes in the next step ─────────────┘

``generate`` and ``stream`` add requests and run steps until theirs have ended; ``add_request`` and ``step``
do the same by hand. All of them may be mixed and called from several threads: a step serves everybody's
requests, whoever runs it. This module is the front: it locks, checks and collects; the step is in ``core``.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from chunkc.config import EngineConfig, GenerationDefaults
from chunkc.errors import ChunkcError, InvalidRequestError
from chunkc.runtime.core import KEPT_COMPLETIONS, EngineCore
from chunkc.runtime.intake import Intake, Params, one_per_prompt
from chunkc.runtime.locks import FairRLock
from chunkc.runtime.metrics import EngineMetrics
from chunkc.runtime.modes import Modes
from chunkc.runtime.multiplex import Fixed, Mode, MultiplexPolicy, check_mode
from chunkc.runtime.outputs import Completion, RequestMetrics, TokenEvent
from chunkc.runtime.pages import PagePool
from chunkc.runtime.prompts import as_list
from chunkc.runtime.request import Request
from chunkc.runtime.scheduler import PrefillPolicy, Scheduler
from chunkc.runtime.spans import SpanLog
from chunkc.runtime.streams import EventSink, Feed, Gather, TokenStream
from chunkc.runtime.teams import release_team

if TYPE_CHECKING:
    from chunkc.runtime.contention import Contention
    from chunkc.runtime.runner import ModelRunner


class Engine:
    """Serves requests with a compiled model.

    Args:
        runner: computes logits; owns the memory of the pages.
        config: budget and limits. Page size and page count are the runner's; where the configuration names
            them, they must agree.
        tokenizer: a HuggingFace tokenizer; without one, prompts are token ids and completions have no text.
        generation_config: the model's defaults, a ``transformers.GenerationConfig`` or a mapping.
        report: how the model was compiled; ``explain`` shows it with ``str``.
        policy: order of prefills; by arrival unless given.
        multiplex: chooses how prefill and decode share the machine, step by step; the configuration's ``multiplex``
            in every step unless given.
        clock: seconds, monotonic; everything measured is on it.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        config: EngineConfig | None = None,
        tokenizer: Any = None,
        generation_config: Any = None,
        report: object = None,
        policy: PrefillPolicy | None = None,
        multiplex: MultiplexPolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config if config is not None else EngineConfig()
        for name in ("page_size", "num_pages"):
            asked = getattr(self.config, name)
            if name in self.config.model_fields_set and asked not in (None, getattr(runner, name)):
                raise ValueError(f"the configuration says {name}={asked}, the runner has {getattr(runner, name)}")
        self.runner, self.tokenizer = runner, tokenizer
        self.pool = PagePool(runner.num_pages, runner.page_size, self.config.max_requests)
        self.scheduler = Scheduler(
            self.pool, budget=self.config.budget, max_requests=self.config.max_requests, policy=policy
        )
        defaults = GenerationDefaults.of(generation_config)
        if defaults.not_applied:
            listed = ", ".join(f"{name}={value!r}" for name, value in defaults.not_applied.items())
            warnings.warn(
                f"the model's generation_config sets {listed}, which chunkc does not apply: outputs can "
                "differ from model.generate",
                stacklevel=2,
            )
        self._report, self._clock = report, clock
        spans = SpanLog()
        policy_of_modes = multiplex or Fixed(self.config.multiplex)
        self._modes = Modes(runner, policy_of_modes, self.config.decode_cores, spans, clock, runner.machine)
        if self.config.multiplex == "streams" or self.config.decode_cores is not None:
            self._modes.division(self.config.decode_cores)  # raises where there is none
        self._core = EngineCore(runner, self.scheduler, self.pool, tokenizer, clock, self._modes, spans)
        self._intake = Intake(
            vocab_size=runner.vocab_size,
            max_positions=runner.max_positions,
            cache_tokens=runner.num_pages * runner.page_size,
            tokenizer=tokenizer,
            defaults=defaults,
            clock=clock,
            is_taken=self._core.is_known,
        )
        self._lock = FairRLock()

    # ---- requests by hand -------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Any,
        sampling_params: Params = None,
        *,
        request_id: str | None = None,
        arrival_time: float | None = None,
    ) -> str:
        """Adds a request; ``step`` works on it.

        Args:
            prompt: a string, a list of token ids or a list of chat messages.
            sampling_params: ``SamplingParams`` or a mapping with its names.
            request_id: a name that no unfinished request has; made up if not given.
            arrival_time: when the request arrived, on the engine's clock. Counts in its metrics only: the
                order of service is the order of the calls.

        Returns:
            The request's id.

        Raises:
            InvalidRequestError: the request is not valid; nothing has been added.
        """
        request = self._intake.prepare(prompt, sampling_params, request_id, arrival_time)
        self._enqueue([request], None)
        return request.request_id

    def step(self) -> list[TokenEvent]:
        """Runs one step if a request is unfinished.

        Returns:
            The new events of requests that were added with ``add_request``, those included that came up while
            a ``generate`` or a ``stream`` ran the steps.
        """
        with self._lock:
            self._core.iterate()
            events, self._core.buffered = self._core.buffered, []
            return events

    def has_unfinished(self) -> bool:
        """Whether ``step`` has something to do or to return."""
        with self._lock:
            self._core.settle()
            return bool(self._core.live or self._core.buffered)

    def abort(self, request_id: str) -> Completion | None:
        """Ends a request now. Its pages are free and no event of it follows.

        Returns:
            What it had generated, or None if there is no unfinished request of that name. None too when
            called from inside a step (by the runner or the tokenizer); the request then ends with the step.
        """
        with self._lock:
            return self._core.abort(request_id)

    def completion(self, request_id: str) -> Completion | None:
        """The completion of a request, None while it is unfinished.

        Raises:
            KeyError: there is no such request among the unfinished and the latest finished ones.
        """
        with self._lock:
            if request_id in self._core.live:
                return None
            if request_id not in self._core.completions:
                raise KeyError(f"no request {request_id!r}; the latest {KEPT_COMPLETIONS} completions are kept")
            return self._core.completions[request_id]

    # ---- whole requests ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: Params | Sequence[Params] = None,
        *,
        progress: bool | None = None,
        errors: Literal["raise", "return"] = "raise",
    ) -> list[Completion]:
        """Completes prompts.

        Args:
            prompts: a string, a list of token ids or a list of chat messages; or a list of these.
            sampling_params: for all prompts, or one per prompt.
            progress: show a progress bar; by default for several prompts on a terminal.
            errors: ``"raise"`` checks all prompts before anything starts and raises if one is not valid; if a
                request fails later, it raises once the others are done. ``"return"`` gives a failed request a
                completion with ``finish_reason="error"`` and completes the rest.

        Returns:
            One completion per prompt, in order.

        Raises:
            InvalidRequestError: a prompt is not valid, with ``errors="raise"``.
            ChunkcError: a request failed while it ran, with ``errors="raise"``.
        """
        if errors not in ("raise", "return"):
            raise ValueError(f"errors must be 'raise' or 'return', not {errors!r}")
        items = as_list(prompts)
        params = one_per_prompt(sampling_params, len(items))
        requests: list[Request | Completion] = []
        for index, (item, param) in enumerate(zip(items, params, strict=True)):
            try:
                requests.append(self._intake.prepare(item, param))
            except InvalidRequestError as error:
                where = f"prompt {index}: " if len(items) > 1 else ""
                if errors == "raise":
                    raise InvalidRequestError(f"{where}{error}") from error
                metrics = RequestMetrics(arrival=self._clock(), finished=self._clock())
                requests.append(
                    Completion(self._intake.new_name(), [], [], "", "error", metrics, error=f"{where}{error}")
                )
        gather = Gather()
        valid = [request for request in requests if isinstance(request, Request)]
        self._run_to_end(valid, gather, progress if progress is not None else _on_terminal(len(items)))
        done = [r if isinstance(r, Completion) else gather.completions[r.request_id] for r in requests]
        if errors == "raise":
            for request, completion in zip(requests, done, strict=True):
                if completion.finish_reason == "error":
                    assert isinstance(request, Request)
                    raise ChunkcError(
                        f"request {completion.request_id!r} failed: {completion.error}; errors='return' "
                        "gives the completions of the others"
                    ) from request.cause
        return done

    def stream(self, prompt: Any, sampling_params: Params = None) -> TokenStream:
        """Adds a request and returns an iterator over its events.

        Raises:
            InvalidRequestError: the request is not valid; nothing has been added.
        """
        request = self._intake.prepare(prompt, sampling_params)
        feed = Feed()
        self._enqueue([request], feed)
        return TokenStream(request.request_id, feed, self._advance, self._drop)

    # ---- looking and turning ----------------------------------------------------------------------------

    @property
    def budget(self) -> int | None:
        """Tokens per step; None computes prompts whole. Set between steps."""
        return self.scheduler.budget

    @budget.setter
    def budget(self, value: int | None) -> None:
        checked = EngineConfig(budget=value).budget
        with self._lock:
            self.scheduler.budget = checked

    @property
    def multiplex(self) -> Mode | MultiplexPolicy:
        """How prefill and decode share the machine: ``"off"``, ``"layers"`` or ``"streams"``, or a policy that chooses.

        May be set while requests run, also in the middle of a prompt: what is under way goes on in the new mode.
        Setting it raises ``ValueError`` where the mode is none, or this process has not the cores for it.
        """
        policy = self._modes.policy
        return policy.chosen if isinstance(policy, Fixed) else policy

    @multiplex.setter
    def multiplex(self, value: Mode | MultiplexPolicy) -> None:
        policy = Fixed(check_mode(value)) if isinstance(value, str) or not hasattr(value, "mode") else value
        if policy == Fixed("streams"):
            self._modes.division(self.decode_cores)
        with self._lock:
            self._modes.policy = policy

    @property
    def decode_cores(self) -> int | None:
        """With ``"streams"``, cores for the decodes; None goes by what ``calibrate`` measured, or else is one. May be
        set while requests run; setting it raises ``ValueError`` where none would be left for the prefill."""
        return self._modes.decode_cores

    @decode_cores.setter
    def decode_cores(self, value: int | None) -> None:
        checked = EngineConfig(decode_cores=value).decode_cores
        if checked is not None:
            self._modes.division(checked)
        with self._lock:
            self._modes.decode_cores = checked

    @property
    def contention(self) -> Contention | None:
        """What ``calibrate`` measured; None before."""
        return self._modes.contention

    def calibrate(self) -> Contention:
        """Measures what decode and prefill cost each other here when they run at the same time; ``"streams"`` divides
        the cores by it, and ``explain`` shows it. Takes seconds, in which nothing is served.

        Raises:
            ValueError: this process has one core only.
            CapacityError: there is no memory for a small cache of its own.
        """
        with self._lock:
            return self._modes.measure()

    @property
    def metrics(self) -> EngineMetrics:
        """A snapshot of what was measured so far."""
        with self._lock:
            return self._core.metrics.snapshot(
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting),
                pages_used=self.pool.num_used,
                num_pages=self.pool.num_pages,
            )

    def reset_metrics(self) -> None:
        """Forgets the measurements so far, for example those of a warm-up."""
        with self._lock:
            self._core.metrics.reset()

    def explain(self) -> str:
        """How the model was compiled (the passes, what they matched and what they changed), how prefill and decode
        share the machine, and what they cost each other where ``calibrate`` has measured it."""
        report = "no compile report" if self._report is None else str(self._report)
        return f"{report}\n\n{self._modes}"

    def check(self) -> None:
        """Proves that no page is lost and that only running requests hold any.

        Raises:
            AssertionError: something is wrong; the message says what.
        """
        with self._lock:
            self.pool.check()
            held = sum(self.pool.num_held(request.row) for request in self.scheduler.running)
            held += self.pool.num_closing
            assert held == self.pool.num_used, f"{self.pool.num_used} pages are used, running requests hold {held}"
            assert len(self._core.live) == self.scheduler.num_unfinished, "a request is lost"

    # ---- inside -----------------------------------------------------------------------------------------

    def _enqueue(self, requests: list[Request], sink: EventSink | None) -> None:
        with self._lock:
            self._core.enqueue(requests, sink)

    def _run_to_end(self, requests: list[Request], gather: Gather, progress: bool) -> None:
        self._enqueue(requests, gather)
        bar = None
        if progress:
            from tqdm import tqdm

            bar = tqdm(total=len(requests), unit="request")
        try:
            while len(gather.completions) < len(requests):
                with self._lock:
                    # Another thread may have finished our last request meanwhile.
                    if len(gather.completions) < len(requests):
                        self._core.iterate()
                if bar is not None:
                    bar.set_postfix(tokens=gather.num_tokens, refresh=False)
                    bar.update(len(gather.completions) - bar.n)
        finally:
            # After an interrupt, nothing of this call stays behind.
            for request in requests:
                if request.request_id not in gather.completions:
                    self.abort(request.request_id)
            release_team()  # other threads may go on
            if bar is not None:
                bar.close()

    def _advance(self, feed: Feed) -> None:
        with self._lock:
            if feed.is_waiting:
                self._core.iterate()

    def _drop(self, request_id: str, may_block: bool) -> None:
        """Aborts the request of a stream; from a finaliser without blocking, as soon as that is possible."""
        if may_block:
            self.abort(request_id)
        elif self._lock.try_enter():
            try:
                self._core.abort(request_id)
            finally:
                self._lock.__exit__(None, None, None)
        else:
            self._core.late_aborts.append(request_id)


def _on_terminal(count: int) -> bool:
    return count > 1 and sys.stderr.isatty()
