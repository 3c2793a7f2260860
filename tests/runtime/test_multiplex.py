"""An engine whose prefills run apart from the decodes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
from test_executors import SECONDS, Gate
from toy_runner import ToyRunner, toy_generate

from chunkc.config import EngineConfig, SamplingParams
from chunkc.runtime import machine
from chunkc.runtime.engine import Engine
from chunkc.runtime.multiplex import MODES, Fixed, StepView

APART = ["layers", "streams"]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * position + 13 * seed) % 97 for position in range(length)]


def engine_with(mode: str, *, num_pages: int = 64, page_size: int = 4, **config) -> Engine:
    return Engine(ToyRunner(num_pages, page_size), config=EngineConfig(multiplex=mode, **config))


def run_out(engine: Engine) -> None:
    while engine.has_unfinished():
        engine.step()
    engine.check()
    assert engine.pool.num_used == 0


def served(engine: Engine, name: str) -> list[int]:
    return engine.completion(name).token_ids


@pytest.fixture(autouse=True)
def _cores(two_cores):
    pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [1, 5, 64, None])
def test_tokens_are_the_same_in_every_mode(mode, budget):
    engine = engine_with(mode, budget=budget)
    prompts = [prompt(length, length) for length in (1, 40, 3, 17, 60)]
    completions = engine.generate(prompts, greedy(12))
    assert [c.token_ids for c in completions] == [toy_generate(p, greedy(12)) for p in prompts]
    engine.check()
    assert engine.pool.num_used == 0


@pytest.mark.parametrize("mode", APART)
def test_decodes_go_on_while_a_prompt_is_under_way(mode):
    engine = engine_with(mode, budget=4)
    first = engine.add_request(prompt(3), greedy(40))
    engine.step()
    second = engine.add_request(prompt(60, 1), greedy(1))
    if mode == "streams":  # so that the prompt cannot end before a decode
        gate = engine.runner.before_part = Gate(tokens=4, part=2)
    for _ in range(4):
        events = engine.step()
        assert [event.request_id for event in events] == [first]
        assert engine.metrics.records[-1].apart
    if mode == "streams":
        gate.open.set()
    run_out(engine)
    assert served(engine, first) == toy_generate(prompt(3), greedy(40))
    assert served(engine, second) == toy_generate(prompt(60, 1), greedy(1))


def test_a_slice_by_layers_costs_what_the_budget_says():
    """The longer the prompt, the more slices; none costs more than the budget's tokens through the model."""
    counts = []
    for length in (8, 32, 128):
        engine = engine_with("layers", budget=33, num_pages=64)
        engine.add_request(prompt(1), greedy(200))
        engine.step()
        engine.add_request(prompt(length, 1), greedy(1))
        steps = 0
        while engine.metrics.prefill_tokens < 1 + length:
            engine.step()
            steps += 1
        counts.append(steps)
        work = engine.runner.row_costs(np.arange(length)).sum()
        assert work / 32 / 2 <= steps <= work / 32 * 2 + 2
    assert counts == sorted(counts) and counts[-1] > 4 * counts[0]


def test_short_prompts_go_together_up_to_the_budget():
    engine = engine_with("layers", budget=10)
    for seed in range(5):
        engine.add_request(prompt(4, seed), greedy(1))
    engine.step()
    assert sorted(batch.num_tokens for batch in engine.runner.batches) == [12]
    run_out(engine)


def test_prompts_by_layers_read_no_prefix_again():
    totals = {}
    for mode in MODES:
        engine = engine_with(mode, budget=8, num_pages=64)
        engine.runner.row_costs = lambda positions: np.ones(len(positions))
        engine.generate(prompt(64), greedy(1))
        totals[mode] = engine.metrics.prefix_tokens
    assert totals["off"] == totals["streams"] == sum(range(0, 64, 8))
    # a step has 3 x 8 tokens of a layer, so the prompt goes through each in three pieces
    assert totals["layers"] == 22 + 43
    engine = engine_with("layers", budget=1000, num_pages=64)
    engine.generate(prompt(64), greedy(1))
    assert engine.metrics.prefix_tokens == 0


@pytest.mark.parametrize("mode", APART)
def test_modes_change_in_the_middle_of_a_prompt(mode):
    engine = engine_with(mode, budget=4)
    first = engine.add_request(prompt(3), greedy(30))
    engine.step()
    second = engine.add_request(prompt(90, 1), greedy(5))
    turn = 0
    while engine.has_unfinished():
        engine.multiplex = MODES[turn % 3]
        engine.step()
        turn += 1
    assert {record.mode for record in engine.metrics.records} == set(MODES)
    assert served(engine, first) == toy_generate(prompt(3), greedy(30))
    assert served(engine, second) == toy_generate(prompt(90, 1), greedy(5))
    engine.check()


def test_pages_of_an_aborted_prompt_are_free_when_its_prefill_has_joined():
    engine = engine_with("streams", budget=100)
    engine.add_request(prompt(3), greedy(40))
    engine.step()
    gate = engine.runner.before_part = Gate(tokens=30, part=1)
    gone = engine.add_request(prompt(20, 1), greedy(3))
    stays = engine.add_request(prompt(10, 2), greedy(3))
    engine.step()
    assert gate.reached.wait(SECONDS)
    used = engine.pool.num_used
    assert engine.abort(gone).finish_reason == "abort"
    engine.check()
    assert engine.pool.num_closing == 5 and engine.pool.num_used == used, "its pages are still being written"
    assert all(event.request_id != gone for event in engine.step())
    gate.open.set()
    run_out(engine)
    assert served(engine, stays) == toy_generate(prompt(10, 2), greedy(3))


def test_a_prefill_that_nobody_wants_any_more_is_stopped():
    engine = engine_with("streams", budget=5)
    engine.add_request(prompt(3), greedy(40))
    engine.step()
    gate = engine.runner.before_part = Gate(tokens=5, part=1)
    gone = engine.add_request(prompt(50, 1), greedy(3))
    engine.step()
    assert gate.reached.wait(SECONDS)
    threading.Timer(0.05, gate.open.set).start()
    engine.abort(gone)  # waits for the part that runs
    assert engine.pool.num_closing == 0
    run_out(engine)
    assert len(engine.runner.batches) < 60, "the rest of the prompt was not computed"


@pytest.mark.parametrize("mode", APART)
def test_an_older_decode_takes_the_pages_of_a_prompt_under_way(mode):
    engine = engine_with(mode, budget=2, num_pages=12, page_size=1)
    old = engine.add_request(prompt(2), greedy(9))
    engine.step()
    engine.step()
    young = engine.add_request(prompt(8, 1), greedy(3))
    run_out(engine)
    assert engine.completion(young).metrics.num_preemptions >= 1
    assert served(engine, old) == toy_generate(prompt(2), greedy(9))
    assert served(engine, young) == toy_generate(prompt(8, 1), greedy(3))


@pytest.mark.parametrize("mode", APART)
def test_a_prefill_that_breaks_ends_its_requests_and_no_other(mode):
    engine = engine_with(mode, budget=4)
    first = engine.add_request(prompt(3), greedy(30))
    engine.step()
    second = engine.add_request(prompt(20, 1), greedy(3))

    def fail(batch, part):
        if batch.num_tokens > 1 and part == 1:
            engine.runner.before_part = lambda batch, part: None
            raise RuntimeError("the model broke")

    engine.runner.before_part = fail
    run_out(engine)
    assert engine.completion(second).error == "the prefill failed with RuntimeError: the model broke"
    assert served(engine, first) == toy_generate(prompt(3), greedy(30))
    assert engine.metrics.failed_steps == 1


@pytest.mark.parametrize("joins", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_joins(joins):
    """Every prompt has the budget's tokens, so each is a prefill of its own, and others decode meanwhile."""
    kinds = 20
    engine = engine_with("streams", budget=8, max_requests=4)
    expected = [toy_generate(prompt(8, seed), greedy(3)) for seed in range(kinds)]
    completions = engine.generate([prompt(8, number % kinds) for number in range(joins)], greedy(3))
    for number, completion in enumerate(completions):
        assert completion.token_ids == expected[number % kinds]
    engine.check()
    assert engine.pool.num_used == 0
    prefills = [span for span in engine.metrics.spans if span.name == "prefill"]
    assert sum(span.parts for span in prefills) == joins * ToyRunner.num_parts
    assert sum(span.lane == "prefill cores" for span in prefills) > joins / 2


@dataclass
class Alternating:
    """A policy that looks at the step."""

    seen: list[StepView] = field(default_factory=list)

    def mode(self, view: StepView):
        self.seen.append(view)
        return MODES[len(self.seen) % 3]


def test_a_policy_chooses_step_by_step():
    policy = Alternating()
    engine = Engine(ToyRunner(64, 4), config=EngineConfig(budget=4), multiplex=policy)
    assert engine.multiplex is policy
    prompts = [prompt(length, length) for length in (3, 40, 9)]
    completions = engine.generate(prompts, greedy(12))
    assert [c.token_ids for c in completions] == [toy_generate(p, greedy(12)) for p in prompts]
    assert [record.mode for record in engine.metrics.records] == [
        MODES[turn % 3] for turn in range(1, len(policy.seen) + 1)
    ]
    assert policy.seen[0] == StepView(decodes=0, prefill_tokens=0, waiting=3, apart=False, contention=None)
    assert any(view.apart and view.decodes for view in policy.seen)


def test_a_policy_that_asks_for_cores_there_are_none_of_is_told(monkeypatch):
    """Whoever steps hears it; no request is lost, and another mode goes on."""
    engine = Engine(ToyRunner(64, 4), config=EngineConfig(budget=4), multiplex=Fixed("streams"))
    monkeypatch.setattr(machine, "available_cores", lambda: [0])
    name = engine.add_request(prompt(30), greedy(5))
    for _ in range(2):
        with pytest.raises(ValueError, match="needs two cores"):
            engine.step()
    with pytest.raises(ValueError, match="needs two cores"):
        engine.generate(prompt(5), greedy(5))
    assert list(engine._core.live) == [name]
    engine.multiplex = "layers"
    run_out(engine)
    assert served(engine, name) == toy_generate(prompt(30), greedy(5))


def test_cores_are_counted_when_the_mode_is_set(monkeypatch):
    engine = engine_with("off")
    engine.multiplex = "streams"
    monkeypatch.setattr(machine, "available_cores", lambda: [0])
    assert engine.generate(prompt(30), greedy(5))[0].token_ids == toy_generate(prompt(30), greedy(5))


@pytest.mark.parametrize("mode", APART)
def test_an_error_around_a_prefill_without_decodes_ends_its_requests(mode, monkeypatch):
    engine = engine_with(mode, budget=4)
    name = engine.add_request(prompt(30), greedy(5))

    def fail(*arguments):
        raise RuntimeError("the executor broke")

    monkeypatch.setattr(engine._modes.executor(mode), "run", fail)
    engine.step()
    assert "the executor broke" in engine.completion(name).error
    engine.check()
    assert engine.pool.num_used == 0


def test_a_measurement_is_not_disturbed_by_the_lanes_there_are():
    """Their OpenMP threads would have all others sleep."""
    engine = engine_with("streams", budget=4)
    engine.add_request(prompt(3), greedy(60))
    name = engine.add_request(prompt(60, 1), greedy(3))
    engine.step()
    engine.step()
    before = [thread for thread in threading.enumerate() if thread.name in ("chunkc decode", "chunkc prefill")]
    lanes = engine._modes._streams._decode, engine._modes._streams._prefill
    engine.calibrate()
    assert engine._modes._streams is None and all(lane.stopping.is_set() is False for lane in lanes)
    del lanes
    for thread in before[-2:]:
        thread.join(SECONDS)
        assert not thread.is_alive()
    run_out(engine)  # the prompt under way goes on in new ones
    assert served(engine, name) == toy_generate(prompt(60, 1), greedy(3))


def test_what_was_measured_is_shown_and_gone_by():
    engine = engine_with("streams")
    assert "not measured" in engine.explain()
    contention = engine.calibrate()
    assert [str(each.division) for each in contention.shared] == ["1 + 1"]
    for cost in (contention.best.decode, contention.best.prefill):
        assert min(cost.whole, cost.alone, cost.beside) > 0
        assert cost.slowdown == cost.beside / cost.alone and cost.total_slowdown == cost.beside / cost.whole
    assert "1 + 1 *" in engine.explain() and "multiplex 'streams'" in engine.explain()
    assert engine.generate(prompt(9), greedy(3))[0].token_ids == toy_generate(prompt(9), greedy(3))


def test_bad_modes_and_divisions_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="multiplex='fast'"):
        EngineConfig(multiplex="fast")
    engine = engine_with("off")
    for bad in ("fast", None, 3):
        with pytest.raises(ValueError, match="'off', 'layers', 'streams'"):
            engine.multiplex = bad
    for mode in MODES:  # also where it waits for another mode
        with pytest.raises(ValueError, match="decode_cores=2: must be 1 to 1"):
            engine_with(mode, decode_cores=2)
    monkeypatch.setattr(machine, "available_cores", lambda: [0])
    with pytest.raises(ValueError, match="needs two cores"):
        engine_with("streams")
    with pytest.raises(ValueError, match="needs two cores"):
        engine.multiplex = "streams"
    assert engine.multiplex == "off"
