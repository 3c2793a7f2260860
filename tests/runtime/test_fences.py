"""Streams of a device that runs late and out of order: fences alone keep what belongs in order."""

from __future__ import annotations

import threading
import time

import pytest
from engine_machine import EngineMachine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cursor import World
from test_executors import keep
from toy_device import SECONDS, DeviceRunner, ToyDevice, device_engine
from toy_runner import toy_generate

from chunkc.config import EngineConfig, SamplingParams
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.cursor import PrefillCursor
from chunkc.runtime.executors import AHEAD, Streams
from chunkc.runtime.fences import PASSED, Immediate
from chunkc.runtime.spans import SpanLog


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=count, ignore_eos=True)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * position + 13 * seed) % 97 for position in range(length)]


def streams_engine(device: ToyDevice, **options):
    config = {"multiplex": "streams", "budget": 4, **options.pop("config", {})}
    return device_engine(device, config=EngineConfig(**config), **options)


class DeviceMachine(EngineMachine):
    """The engine in every way, in all modes, on a device that runs late."""

    modes = ("off", "layers", "streams", "streams")

    def make_engine(self, *, num_pages, page_size, config):
        self.device = ToyDevice(seed=num_pages * 31 + page_size)
        engine = device_engine(self.device, num_pages=num_pages, page_size=page_size, config=config)
        self.runner = engine.runner
        return engine

    def teardown(self):
        super().teardown()
        if hasattr(self, "device"):
            self.device.check()


TestDeviceMachine = DeviceMachine.TestCase
TestDeviceMachine.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    lengths=st.lists(st.integers(1, 30), min_size=2, max_size=8),
    spare=st.integers(0, 12),
    budget=st.sampled_from([1, 4, 9, None]),
)
def test_tokens_are_right_in_any_order_that_the_fences_allow(seed, lengths, spare, budget):
    """In a cache that is too small for all, so that pages change hands and prompts are preempted."""
    device = ToyDevice(seed)
    config = {"budget": budget, "max_requests": 4}
    engine = streams_engine(device, num_pages=36 + spare, page_size=1, config=config)
    completions = engine.generate([prompt(length, n) for n, length in enumerate(lengths)], greedy(6))
    device.check()
    for number, (length, completion) in enumerate(zip(lengths, completions, strict=True)):
        assert completion.token_ids == toy_generate(prompt(length, number), greedy(6))
    engine.check()
    assert engine.pool.num_used == 0


def serve_with_little_room(device: ToyDevice) -> None:
    engine = streams_engine(device, num_pages=30, page_size=1, config={"max_requests": 3})
    prompts = [prompt(length, length) for length in (3, 12, 5, 14, 9, 11, 4, 13)]
    engine.generate(prompts, greedy(7), errors="return")


@pytest.mark.parametrize("stream", ["whole", "decode", "prefill"])
def test_a_stream_that_does_not_wait_is_found(stream):
    """The device tells: with the fences nothing is found, without those of any one stream something is."""
    serve_with_little_room(sound := ToyDevice(1))
    sound.check()
    device = ToyDevice(1)
    getattr(device, stream).ignores = lambda fence: True
    serve_with_little_room(device)
    assert device.races


def test_a_join_that_does_not_wait_for_the_prefill_is_found():
    device = ToyDevice(1)
    device.whole.ignores = lambda fence: fence.clock[2] > device.whole.clock[2]  # those of the prefill
    serve_with_little_room(device)
    found = {"decode reads what prefill writes", "decode samples from what prefill writes"}
    assert found & set(device.races)


def test_decodes_go_on_and_nothing_joins_while_the_device_is_at_the_prefill():
    device = ToyDevice()
    engine = streams_engine(device, config={"budget": 64})
    first = engine.add_request(prompt(3), greedy(40))
    engine.step()
    device.prefill.held = True
    second = engine.add_request(prompt(20, 1), greedy(3))
    gone = engine.add_request(prompt(9, 2), greedy(3))
    for _ in range(10):
        assert [event.request_id for event in engine.step()] == [first]
    used = engine.pool.num_used
    assert engine.abort(gone).finish_reason == "abort"
    assert engine.pool.num_closing > 0 and engine.pool.num_used == used, "the device still writes its pages"
    assert [event.request_id for event in engine.step()] == [first]
    device.release(device.prefill)
    while engine.has_unfinished():
        engine.step()
    device.check()
    assert engine.completion(first).token_ids == toy_generate(prompt(3), greedy(40))
    assert engine.completion(second).token_ids == toy_generate(prompt(20, 1), greedy(3))
    engine.check()
    assert engine.pool.num_used == 0


def test_without_decodes_a_step_waits_for_the_prefill():
    device = ToyDevice()
    engine = streams_engine(device, config={"budget": 64})
    engine.generate(prompt(20), greedy(1))
    assert engine.metrics.steps <= 2, "no steps that do nothing"
    device.check()


class Streamed(World):
    """A decode and a prompt on a device."""

    def __init__(self, prompt: int = 12) -> None:
        super().__init__((6, 0), (prompt, 0))
        self.device = ToyDevice()
        self.runner = DeviceRunner(self.device, 256, 4)
        decode, prefill = self.requests
        with self.device.active():
            self.runner.run(pack([Chunk(decode, 0, 5)], self.pool))
        self.batch = pack([Chunk(decode, 5, 6)], self.pool)
        chunk = Chunk(prefill, 0, prefill.num_tokens)
        self.prefill_cursor = PrefillCursor(self.runner, self.pool, [chunk], order="tokens", piece_limit=1)
        self.streams = Streams(self.runner, self.device.divisions()[0], SpanLog(), machine=self.device)


def test_the_order_of_records_and_waits():
    world = Streamed()
    device = world.device
    device.prefill.held = True  # so that the rest of the log is not in between
    device.log.clear()
    with device.active():
        world.streams.run(world.batch, keep, world.prefill_cursor, None)
    log = device.log
    forked = log[0][2]
    assert log[0][:2] == ("whole", "record")
    assert ("prefill", "wait", forked) in log and ("decode", "wait", forked) in log
    decode = [entry[1] for entry in log if entry[0] == "decode"]
    assert decode == ["wait", "part 0 of 1", "part 1 of 1", "part 2 of 1", "record"]
    joined = next(entry[2] for entry in log if entry[:2] == ("decode", "record"))
    assert [entry[1:] for entry in log if entry[0] == "whole"] == [("record", forked), ("wait", joined)]
    assert all(fence.clock[2] == 0 for _, what, fence in log if what == "wait"), "nobody waits for the prefill"
    prefill = [entry[1] for entry in log if entry[0] == "prefill"]
    assert prefill[0] == "wait", "the prefill comes behind what was given back before"

    device.release(device.prefill)
    device.log.clear()
    with device.active():
        world.streams.settle()
    last = [entry[2] for entry in device.log if entry[:2] == ("prefill", "record")][-1]
    assert device.log[-1] == ("whole", "wait", last), "and what comes next, behind it"
    device.check()


def test_the_prefill_is_given_to_the_device_a_few_parts_ahead():
    world = Streamed()
    device = world.device
    device.prefill.held = True
    with device.active():
        world.streams.run(world.batch, keep, world.prefill_cursor, None)

    def given() -> int:
        return sum(name == "prefill" and what.startswith("part") for name, what, _ in list(device.log))

    until = time.monotonic() + SECONDS
    while given() <= AHEAD and time.monotonic() < until:
        time.sleep(0.001)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (world.streams.settle(), done.set()))
    thread.start()
    assert not done.wait(0.05), "waits for the part in front"
    assert given() == AHEAD + 1
    device.release(device.prefill)
    thread.join(SECONDS)
    assert done.is_set() and not world.prefill_cursor.exhausted


def test_a_cursor_is_done_when_the_device_is():
    world = Streamed(prompt=4)
    cursor, device = world.prefill_cursor, world.device
    with device.active():
        while not cursor.exhausted:
            cursor.advance(device.whole.record)
        assert not cursor.fence.has_passed
        cursor.fence.wait()
    assert cursor.done and cursor.error is None


def test_a_part_that_breaks_keeps_the_fence_of_what_is_under_way():
    world = Streamed(prompt=4)
    cursor, device = world.prefill_cursor, world.device

    def fail(batch):
        raise RuntimeError("broken")

    with device.active():
        for _ in range(3):
            cursor.advance(device.whole.record)
        world.runner.before = fail
        cursor.advance(device.whole.record)
    assert cursor.exhausted and str(cursor.error) == "broken"
    assert not cursor.fence.has_passed
    cursor.fence.wait()
    assert cursor.done


def test_on_the_hosts_cores_every_fence_has_passed():
    stream = Immediate()
    stream.wait(stream.record())
    assert stream.record() is PASSED and PASSED.passed()
