"""A hypothesis state machine that uses an engine in every way and compares with generation alone.

Subclass it to drive another model: ``make_engine`` builds the engine, ``expected`` says what must come out.

    class TinyLlamaMachine(EngineMachine):
        vocab_size, max_prompt = 64, 9
        def make_engine(self, *, num_pages, page_size, config): ...
        def expected(self, prompt, params): ...

    TestTinyLlama = TinyLlamaMachine.TestCase
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy_runner import VOCAB, ToyRunner, toy_generate

from chunkc.config import EngineConfig, SamplingParams
from chunkc.errors import ChunkcError
from chunkc.runtime.engine import Engine
from chunkc.runtime.outputs import TokenEvent
from chunkc.runtime.streams import TokenStream

# Small ones often: below the number of decodes they have to take turns.
BUDGETS = st.sampled_from([1, 1, 2, 2, 3, 5, 8, 24, None])
WHICH = st.integers(0, 11)  # one of those that there are, counted around


@dataclass
class Tracked:
    """A request as its user sees it."""

    prompt: list[int]
    params: SamplingParams
    events: list[TokenEvent] = field(default_factory=list)


class EngineMachine(RuleBasedStateMachine):
    """add, step, abort, stream, generate, another budget, a failing model: in any order, in a small cache.

    What is drawn does not depend on how far requests have come: with a thread of its own for prefills that is not the
    same in every run, and hypothesis wants draws that are.
    """

    vocab_size = VOCAB
    max_prompt = 14
    max_new = 14
    samples = True  # whether requests that sample take part; else all are greedy
    can_fail = True  # whether the model may raise; needs ``fail_next_step``
    modes: tuple[str, ...] = ("off",)  # how prefill and decode may share the machine

    def make_engine(self, *, num_pages: int, page_size: int, config: EngineConfig) -> Engine:
        """An engine with a fresh cache of the given size."""
        self.runner = ToyRunner(num_pages, page_size)
        return Engine(self.runner, config=config)

    def expected(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """What a request gives that has the model to itself."""
        return toy_generate(prompt, params)

    def fail_next_step(self) -> None:
        """Makes the model raise in the next step."""

        def fail(batch: object) -> None:
            self.runner.before = lambda batch: None
            raise RuntimeError("the model broke")

        self.runner.before = fail

    # ---- the world ------------------------------------------------------------------------------------

    @initialize(
        page_size=st.sampled_from([1, 1, 2, 3, 16]),
        spare=st.integers(0, 16),
        budget=BUDGETS,
        max_requests=st.integers(1, 6),
        data=st.data(),
    )
    def start(self, page_size, spare, budget, max_requests, data):
        # Just enough for the largest request, and a few pages to fight for.
        num_pages = -(-(self.max_prompt + self.max_new) // page_size) + spare
        config = EngineConfig(budget=budget, max_requests=max_requests)
        self.engine = self.make_engine(num_pages=num_pages, page_size=page_size, config=config)
        self.engine.multiplex = data.draw(st.sampled_from(self.modes))
        self.open: dict[str, Tracked] = {}
        self.streams: list[tuple[TokenStream, Tracked]] = []
        self.patience = 0

    def requests(self, data):
        token = st.integers(0, self.vocab_size - 1)
        prompt = data.draw(st.lists(token, min_size=1, max_size=self.max_prompt))
        sampled = self.samples and data.draw(st.booleans())
        eos = data.draw(st.lists(token, max_size=self.vocab_size // 6))
        extra = {"do_sample": True, "seed": data.draw(st.integers(0, 3)), "top_k": 0} if sampled else {}
        new = data.draw(st.integers(1, self.max_new))
        return Tracked(prompt, SamplingParams(max_new_tokens=new, eos_token_id=tuple(eos), **extra))

    # ---- what can happen ------------------------------------------------------------------------------

    @rule(data=st.data(), count=st.integers(1, 3))
    def add(self, data, count):
        for _ in range(count):
            tracked = self.requests(data)
            self.open[self.engine.add_request(tracked.prompt, tracked.params)] = tracked

    @rule(data=st.data())
    def open_stream(self, data):
        tracked = self.requests(data)
        if len(self.streams) < 3:
            self.streams.append((self.engine.stream(tracked.prompt, tracked.params), tracked))

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.one_step()

    @rule(which=WHICH)
    def abort(self, which):
        if not self.open:
            return
        name = sorted(self.open)[which % len(self.open)]
        completion = self.engine.abort(name)
        tracked = self.open.pop(name)
        if completion is None:  # it had ended, and its events were not fetched yet
            return
        assert completion.finish_reason == "abort"
        assert completion.token_ids == self.expected(tracked.prompt, tracked.params)[: len(completion.token_ids)]
        assert all(event.request_id != name for event in self.take(self.engine.step()))

    @rule(which=WHICH, count=st.integers(1, 4))
    def read_stream(self, which, count):
        if not self.streams:
            return
        index = which % len(self.streams)
        stream, tracked = self.streams[index]
        for _ in range(count):
            try:
                tracked.events.append(next(stream))
            except StopIteration:
                self.finish_stream(*self.streams.pop(index))
                return
            except ChunkcError as error:
                assert self.can_fail and "the model broke" in str(error)
                self.streams.pop(index)
                return

    @rule(which=WHICH)
    def close_stream(self, which):
        if not self.streams:
            return
        stream, tracked = self.streams.pop(which % len(self.streams))
        stream.close()
        expected = self.expected(tracked.prompt, tracked.params)
        assert [event.token_id for event in tracked.events] == expected[: len(tracked.events)]
        assert stream.completion is not None and list(stream) == []

    @rule(data=st.data(), count=st.integers(0, 3))
    def generate(self, data, count):
        wanted = [self.requests(data) for _ in range(count)]
        done = self.engine.generate([t.prompt for t in wanted], [t.params for t in wanted], errors="return")
        for tracked, completion in zip(wanted, done, strict=True):
            if completion.finish_reason != "error":
                assert completion.token_ids == self.expected(tracked.prompt, tracked.params)

    @rule(budget=BUDGETS)
    def change_budget(self, budget):
        self.engine.budget = budget

    @precondition(lambda self: len(self.modes) > 1)
    @rule(data=st.data())
    def change_mode(self, data):
        self.engine.multiplex = data.draw(st.sampled_from(self.modes))

    @precondition(lambda self: self.can_fail)
    @rule()
    def break_model(self):
        self.fail_next_step()

    # ---- what must hold -------------------------------------------------------------------------------

    def one_step(self):
        scheduler, pool = self.engine.scheduler, self.engine.pool
        steps = self.engine.metrics.steps
        decodes = sum(request.is_decoding for request in scheduler.running)
        every_decode_has_a_page = pool.num_free >= decodes
        unfinished = [*scheduler.running, *scheduler.waiting]
        oldest = min(unfinished, key=lambda request: request.order, default=None)
        progress = (oldest.num_tokens, oldest.num_computed) if oldest else None

        self.take(self.engine.step())

        metrics = self.engine.metrics
        if metrics.steps == steps:
            assert oldest is None
            return
        record = metrics.records[-1]
        if record.mode == "off" and not record.apart:
            assert record.tokens >= 1
            assert record.tokens <= (record.budget or record.tokens)
        if every_decode_has_a_page:
            assert record.decode_tokens == min(decodes, record.budget or decodes)
        if record.apart:  # a prompt under way apart goes on part by part, in its own time
            self.patience = 0
            return
        # The oldest goes on, at the latest when every other running request has had its turn.
        stuck = (oldest.num_tokens, oldest.num_computed) == progress and oldest in (
            *scheduler.running,
            *scheduler.waiting,
        )
        self.patience = self.patience + 1 if stuck else 0
        assert self.patience <= scheduler.max_requests, "the oldest request starves"

    def take(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            assert event.request_id in self.open, "an event of a request that has ended"
            tracked = self.open[event.request_id]
            assert event.index == len(tracked.events)
            tracked.events.append(event)
            if event.finished:
                self.finish(event.request_id, self.open.pop(event.request_id))
        return events

    def finish(self, name: str, tracked: Tracked) -> None:
        completion = self.engine.completion(name)
        assert completion is not None
        last = tracked.events[-1]
        assert completion.finish_reason == last.finish_reason
        tokens = [event.token_id for event in tracked.events if event.token_id is not None]
        assert completion.token_ids == tokens and completion.prompt_token_ids == tracked.prompt
        expected = self.expected(tracked.prompt, tracked.params)
        if last.finish_reason == "error":
            assert self.can_fail and "the model broke" in completion.error
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
            assert len(completion.metrics.itl) == len(tokens) - 1

    def finish_stream(self, stream: TokenStream, tracked: Tracked) -> None:
        assert [event.token_id for event in tracked.events] == self.expected(tracked.prompt, tracked.params)
        assert stream.completion.token_ids == [event.token_id for event in tracked.events]
        assert tracked.events[-1].finished

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "engine"):
            self.engine.check()
            scheduler = self.engine.scheduler
            assert len(scheduler.running) <= scheduler.max_requests
            for queue in (scheduler.running, scheduler.waiting):
                assert [r.order for r in queue] == sorted(r.order for r in queue)

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        # Everything that is left ends within a number of steps that is known beforehand: each request alone
        # needs at most one step per token, and is preempted at most once for each of the others' tokens.
        left = len(self.open) + len(self.streams) + 1
        bound = (left * (self.max_prompt + self.max_new)) ** 2 + 10
        while self.engine.has_unfinished():
            self.one_step()
            bound -= 1
            assert bound > 0, "requests never end"
        assert not self.open
        for stream, tracked in self.streams:
            try:
                tracked.events.extend(stream)
            except ChunkcError:
                continue
            self.finish_stream(stream, tracked)
        self.engine.check()
        assert self.engine.pool.num_used == 0
