"""The scheduler by itself, without a model: one test for each class of bug that public schedulers had."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from chunkc.config import ResolvedSampling
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request, RequestStatus
from chunkc.runtime.scheduler import Schedule, Scheduler


class World:
    """A scheduler whose requests get the token 7 whenever they are due one."""

    def __init__(self, budget=16, pages=1000, page_size=1, max_requests=100, policy=None):
        self.pool = PagePool(pages, page_size, max_requests)
        self.scheduler = Scheduler(self.pool, budget=budget, max_requests=max_requests, policy=policy)
        self.numbers = itertools.count()
        self.history: list[Schedule] = []

    def add(self, prompt: int, new: int = 1000) -> Request:
        number = next(self.numbers)
        sampling = ResolvedSampling(max_new_tokens=new)
        tokens = np.zeros(prompt, dtype=np.int64)
        request = Request.create(f"r{number}", number, tokens, sampling, RequestMetrics(0.0))
        self.scheduler.add(request)
        return request

    def step(self) -> dict[str, int]:
        """One step; tokens per request, in the order of the batch."""
        plan = self.scheduler.schedule()
        self.history.append(plan)
        sizes = {chunk.request.request_id: chunk.num_tokens for chunk in plan.batch}
        assert all(size >= 1 for size in sizes.values()), "an empty chunk"
        assert plan.budget is None or sum(sizes.values()) <= plan.budget
        for chunk in plan.batch:
            assert chunk.request.status is RequestStatus.RUNNING
            assert self.pool.capacity(chunk.request.row) >= chunk.end, "a token without a slot"
        due = [chunk.request for chunk in plan.batch if chunk.samples]
        self.scheduler.commit(plan.batch)
        for request in due:
            request.append(7)
            if request.is_full:
                self.scheduler.remove(request)
        self.pool.check()
        return sizes

    def run(self, limit: int = 10_000) -> None:
        while self.scheduler.num_unfinished:
            assert self.step(), "a step that does nothing"
            limit -= 1
            assert limit, "it never ends"
        assert self.pool.num_used == 0

    @property
    def preemptions(self) -> int:
        return sum(len(plan.preempted) for plan in self.history)


# ---- the order of service -----------------------------------------------------------------------------


def test_decodes_first_then_chunks_of_several_prefills_by_arrival():
    world = World(budget=10)
    world.add(3)
    assert world.step() == {"r0": 3}
    world.add(12)
    world.add(4)
    world.add(4)
    assert world.step() == {"r0": 1, "r1": 9}
    assert world.step() == {"r0": 1, "r1": 3, "r2": 4, "r3": 2}
    assert world.step() == {"r0": 1, "r1": 1, "r2": 1, "r3": 2}
    plan = world.history[-1]
    assert (plan.num_decode_tokens, plan.num_prefill_tokens) == (3, 2)


def test_a_step_never_waits_to_become_full():
    world = World(budget=4096)
    world.add(1)
    assert world.step() == {"r0": 1}


def test_without_a_budget_prompts_are_computed_whole():
    world = World(budget=None)
    world.add(700)
    world.add(300)
    assert world.step() == {"r0": 700, "r1": 300}


def test_the_budget_may_change_between_steps():
    world = World(budget=4)
    world.add(20)
    world.step()
    world.scheduler.budget = 9
    assert world.step() == {"r0": 9}


def test_max_requests_bounds_the_running_ones():
    world = World(budget=100, max_requests=2)
    for _ in range(5):
        world.add(3, new=2)
    assert list(world.step()) == ["r0", "r1"]
    world.run()
    assert max(len(plan.batch) for plan in world.history) == 2


def test_the_last_token_of_a_prompt_is_a_prefill_even_alone():
    world = World(budget=4)
    world.add(5)
    world.step()
    world.step()
    assert (world.history[-1].num_decode_tokens, world.history[-1].num_prefill_tokens) == (0, 1)


def test_a_decode_that_shares_its_step_with_its_own_last_chunk_does_not_exist():
    # The chunk that reaches the last token gives the first token in the same step; the decode follows.
    world = World(budget=3)
    request = world.add(5)
    assert world.step() == {"r0": 3}
    assert request.num_generated == 0
    assert world.step() == {"r0": 2}
    assert request.num_generated == 1 and request.is_decoding


# ---- classes of bugs ----------------------------------------------------------------------------------


def test_two_half_admitted_requests_do_not_wait_for_each_other():
    # 10 pages, two prompts of 8: admitting both would leave each with a half and no page to go on.
    world = World(budget=4, pages=10)
    world.add(8, new=2)
    world.add(8, new=2)
    world.step()
    assert [r.request_id for r in world.scheduler.running] == ["r0"]
    world.run()
    assert world.preemptions == 0


def test_an_evicted_request_is_not_prefilled_and_evicted_for_ever():
    world = World(budget=8, pages=12)
    a, b = world.add(4, new=8), world.add(4, new=8)
    world.run(limit=60)
    assert a.metrics.num_preemptions == 0, "the oldest is never evicted"
    # Each return of b needs pages that a gave back, and a gives back only once.
    assert 1 <= b.metrics.num_preemptions <= 2
    assert b.num_generated == 8


def test_the_schedule_of_an_evicted_request_is_dropped_and_its_budget_reused():
    # r0 is a prefill in progress, r1 a younger decode. The step first serves r1's decode, then r0 finds no
    # page: r1 is evicted, although it was in the plan already.
    world = World(budget=4, pages=9)
    old = world.add(8, new=1)
    world.step()
    young = world.add(3, new=20)
    # The young one is let in although the old one's pages are promised, as a policy might.
    world.scheduler._admit(young)
    world.pool.extend(young.row, 3)
    young.num_computed = 3
    young.append(7)
    world.pool.extend(world.scheduler.running[0].row, 1)
    old.num_computed = 5
    plan = world.scheduler.schedule()
    assert [r.request_id for r in plan.preempted] == ["r1"]
    assert [(c.request.request_id, c.num_tokens) for c in plan.batch] == [("r0", 3)]
    assert plan.num_decode_tokens == 0 and young.row == -1 and young.num_computed == 0
    world.scheduler.commit(plan.batch)
    assert young.num_computed == 0, "a stale chunk was counted"


@pytest.mark.parametrize("prompt, budget", [(8, 8), (8, 4), (9, 8), (1, 1), (16, 1)])
def test_a_chunk_that_ends_with_the_prompt_is_followed_by_a_decode_not_by_an_empty_chunk(prompt, budget):
    world = World(budget=budget)
    world.add(prompt, new=2)
    world.run()  # step() rejects empty chunks
    sizes = [plan.batch[0].num_tokens for plan in world.history]
    assert sum(sizes) == prompt + 1 and len(sizes) == -(-prompt // budget) + 1


def test_a_prefill_keeps_its_turn_when_later_requests_arrive():
    # Admission starves where chunks saturate the budget: here all are served by arrival, so the last gets in.
    world = World(budget=4)
    requests = [world.add(9, new=3) for _ in range(6)]
    for _ in range(500):
        if not world.scheduler.num_unfinished:
            break
        world.step()
        world.add(9, new=3) if len(world.history) < 40 else None
    assert all(request.status is RequestStatus.FINISHED for request in requests)


def test_decodes_do_not_starve_behind_prefills():
    world = World(budget=5)
    decode = world.add(1, new=50)
    world.step()
    for _ in range(20):
        world.add(100, new=1)
    for _ in range(49):
        assert world.step()["r0"] == 1
    assert decode.status is RequestStatus.FINISHED


def test_more_decodes_than_budget_take_turns():
    world = World(budget=8)
    for _ in range(8):
        world.add(1, new=40)
    world.step()
    world.scheduler.budget = 3
    served = [list(world.step()) for _ in range(8)]
    assert all(len(step) == 3 for step in served)
    counts = {name: sum(name in step for step in served) for name in served[0] + served[1] + served[2]}
    assert counts == {f"r{i}": 3 for i in range(8)}
    world.run()


def test_the_budget_left_is_never_negative():
    world = World(budget=8)
    for _ in range(8):
        world.add(1)
    world.step()
    world.add(50)
    world.scheduler.budget = 2
    for _ in range(10):
        assert sum(world.step().values()) == 2
    assert Schedule(0, budget=1).room(-3) == 0


def test_decodes_without_a_page_do_not_block_the_others_turn():
    # Budget 1 and a decode that sits out for want of a page: the turn goes to the next, not to nobody.
    world = World(budget=4, pages=9, page_size=2)
    a, b = world.add(4, new=14), world.add(4, new=8)
    world.step()
    world.step()
    world.scheduler.budget = 1
    world.run(limit=200)
    assert a.num_generated == 14 and b.num_generated == 8


class Shortest:
    """Shortest first; a request goes to the front once it has been passed over often enough."""

    def __init__(self, patience):
        self.patience, self.passed = patience, {}

    def order(self, prefills, waiting):
        everyone = [*prefills, *waiting]
        for request in everyone:
            self.passed[request] = self.passed.get(request, -1) + 1
        aged = [request for request in everyone if self.passed[request] >= self.patience]
        fresh = [request for request in everyone if self.passed[request] < self.patience]
        return sorted(aged, key=lambda r: r.order) + sorted(fresh, key=lambda r: (r.num_remaining, r.order))


def test_a_policy_with_ageing_serves_the_long_prompt():
    def steps_until_served(patience):
        world = World(budget=4, policy=Shortest(patience))
        long = world.add(40, new=1)
        for count in range(60):
            world.add(4, new=1)
            world.step()
            if long.status is RequestStatus.FINISHED:
                return count
        return None

    assert steps_until_served(patience=10**9) is None, "shortest first alone starves it"
    assert steps_until_served(patience=5) is not None


def test_a_policy_that_admits_out_of_order_loses_nothing():
    world = World(budget=6, pages=14, policy=Shortest(3))
    requests = [world.add(prompt, new=4) for prompt in (10, 2, 7, 1, 9, 3)]
    world.run(limit=400)
    assert all(request.num_generated == 4 for request in requests)


def test_a_prefill_that_had_to_stop_goes_on():
    # r1's prefill finds no page because r0 grew; it sits out and finishes after r0.
    world = World(budget=6, pages=16)
    a, b = world.add(4, new=9), world.add(10, new=2)
    world.run(limit=100)
    assert a.num_generated == 9 and b.num_generated == 2
    assert a.metrics.num_preemptions == 0


def test_a_prefill_takes_what_pages_there_are_before_it_evicts():
    world = World(budget=8, pages=12)
    old = world.add(1, new=30)
    world.step()
    mid = world.add(9, new=1)
    assert world.step() == {"r0": 1, "r1": 7}
    assert world.pool.num_free == 3
    assert world.step() == {"r0": 1, "r1": 2}
    assert mid.status is RequestStatus.FINISHED and old.is_decoding and world.preemptions == 0


def test_only_the_young_are_evicted():
    world = World(budget=16, pages=20)
    requests = [world.add(4, new=12) for _ in range(4)]
    evicted = []
    while world.scheduler.num_unfinished:
        world.step()
        for request in world.history[-1].preempted:
            assert all(other.order < request.order for other in world.scheduler.running)
            evicted.append(request.request_id)
    assert "r3" in evicted and "r0" not in evicted
    assert all(request.num_generated == 12 for request in requests)


def test_an_evicted_request_keeps_its_tokens_and_its_place():
    world = World(budget=16, pages=10)
    world.add(4, new=6)
    young = world.add(4, new=6)
    while not world.preemptions:
        world.step()
    generated = young.num_generated
    assert generated > 0 and young.num_remaining == 4 + generated
    third = world.add(1, new=1)
    assert world.scheduler.waiting == [young, third]
    world.run()
    assert young.num_generated == 6


def test_a_failed_step_is_planned_again():
    world = World(budget=4)
    world.add(10)
    first, second = world.scheduler.schedule(), world.scheduler.schedule()  # the first was never committed
    spans = [[(c.request.request_id, c.start, c.end) for c in plan.batch] for plan in (first, second)]
    assert spans[0] == spans[1]
    world.pool.check()
