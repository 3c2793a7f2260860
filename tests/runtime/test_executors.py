"""Batch and prefill in turns and at the same time."""

from __future__ import annotations

import threading

import pytest
from test_cursor import World, walk

from chunkc.runtime import executors
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.executors import Inline, Streams
from chunkc.runtime.machine import CoreDivision
from chunkc.runtime.spans import SpanLog
from chunkc.runtime.thread_limits import available_cores

SECONDS = 20  # far more than any of this takes


class Gate:
    """Holds the toy model in one part of batches of a size."""

    def __init__(self, tokens: int, part: int) -> None:
        self.tokens, self.part = tokens, part
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, batch, part) -> None:
        if (batch.num_tokens, part) == (self.tokens, self.part):
            self.reached.set()
            assert self.open.wait(SECONDS)


class Mixed(World):
    """A decode and a prompt."""

    def __init__(self, prompt: int = 12) -> None:
        super().__init__((6, 5), (prompt, 0))
        decode, prefill = self.requests
        self.batch = pack([Chunk(decode, 5, 6)], self.pool)
        self.prefill = prefill
        self.spans = SpanLog()

    def apart(self, order: str, limit: float | None):
        """A cursor for the prompt."""
        from chunkc.runtime.cursor import PrefillCursor

        chunk = Chunk(self.prefill, 0, self.prefill.num_tokens)
        return PrefillCursor(self.runner, self.pool, [chunk], order=order, piece_limit=limit)

    def streams(self) -> Streams:
        first, second = available_cores()[:2]
        return Streams(self.runner, CoreDivision((first,), (second,)), self.spans)


def keep(logits):
    return logits


def names(spans: SpanLog) -> list[tuple[str, str, int, int | None]]:
    return [(span.lane, span.name, span.tokens, span.parts) for span in spans.all()]


def test_inline_is_the_batch_and_then_a_slice():
    world = Mixed()
    inline, cursor = Inline(world.runner, world.spans), world.apart("tokens", None)
    piece = cursor.pieces[0]
    # half of the work of one way through: one and a half parts of three, and the half is not begun
    logits = inline.run(world.batch, keep, cursor, piece.work / 2)
    assert logits.shape == (1, 97) and cursor.parts_done in (1, 2)
    assert names(world.spans)[0] == ("all cores", "batch", 1, None)
    assert names(world.spans)[1] == ("all cores", "prefill", 12, cursor.parts_done)


def test_a_slice_is_at_least_a_part_and_none_without_limit():
    world = Mixed()
    inline, cursor = Inline(world.runner, world.spans), world.apart("layers", 4.0)
    assert inline.run(None, keep, cursor, 1e-9) is None
    assert cursor.parts_done == 1
    inline.run(None, keep, cursor, None)
    assert cursor.done
    assert inline.run(world.batch, keep, cursor, None).shape == (1, 97)


def test_a_batch_does_not_wait_for_the_prefill(two_cores):
    world = Mixed()
    gate = world.runner.before_part = Gate(tokens=12, part=1)
    streams, cursor = world.streams(), world.apart("tokens", None)
    for _ in range(3):  # with the prefill held in its second part
        assert streams.run(world.batch, keep, cursor, 1.0).shape == (1, 97)
        assert gate.reached.wait(SECONDS)
    assert cursor.parts_done == 1 and not cursor.done
    gate.open.set()
    streams.settle()
    assert cursor.parts_done in (2, 3)
    assert ("decode cores", "batch", 1, None) in names(world.spans)


def test_logits_are_used_where_they_were_computed(two_cores):
    world = Mixed()
    streams = world.streams()

    def where(_=None):
        return threading.current_thread().name

    main = threading.current_thread().name
    assert streams.run(world.batch, where, None, None) == main
    assert streams.run(world.batch, where, world.apart("tokens", None), None) == "chunkc decode"
    assert streams.compute(where) == "chunkc decode"
    assert Inline(world.runner, world.spans).compute(where) == main


def test_settle_waits_for_the_part_that_runs_and_no_other_begins(two_cores):
    world = Mixed()
    gate = world.runner.before_part = Gate(tokens=12, part=0)
    streams, cursor = world.streams(), world.apart("tokens", None)
    streams.run(world.batch, keep, cursor, 1.0)
    assert gate.reached.wait(SECONDS)
    settled = threading.Event()
    thread = threading.Thread(target=lambda: (streams.settle(), settled.set()))
    thread.start()
    assert not settled.wait(0.05)
    gate.open.set()
    thread.join(SECONDS)
    assert settled.is_set() and cursor.parts_done == 1
    walk(cursor)  # nobody else works on it now
    assert cursor.done and cursor.error is None


def test_without_decodes_the_prefill_goes_on_inline(two_cores):
    world = Mixed()
    streams, cursor = world.streams(), world.apart("tokens", 6)
    streams.run(world.batch, keep, cursor, 1.0)
    while not cursor.done:
        streams.run(None, keep, cursor, 1.0)
    assert {span.lane for span in world.spans.all() if span.name == "prefill"} <= {"all cores", "prefill cores"}
    assert cursor.error is None and cursor.pieces[-1].logits is not None


def test_a_prefill_that_was_stopped_goes_on_with_the_next_batch(two_cores):
    world = Mixed()
    streams, cursor = world.streams(), world.apart("tokens", 1)
    while not cursor.done:
        streams.run(world.batch, keep, cursor, 1.0)
        streams.settle()
    assert cursor.parts_done == 12 * 3


def test_the_next_cursor_starts_although_the_lane_still_ends_the_last(two_cores):
    world = Mixed()
    streams = world.streams()
    for _ in range(200):
        cursor = world.apart("tokens", None)
        while not cursor.done:
            streams.run(world.batch, keep, cursor, 1.0)
        assert cursor.error is None
        cursor.close()


def test_an_error_of_the_batch_is_raised_and_the_prefill_goes_on(two_cores):
    world = Mixed()

    def fail(batch, part):
        if batch.num_tokens == 1:
            raise RuntimeError("broken")

    streams, cursor = world.streams(), world.apart("tokens", None)
    world.runner.before_part = fail
    with pytest.raises(RuntimeError, match="broken"):
        streams.run(world.batch, keep, cursor, 1.0)
    streams.run(None, keep, cursor, None)
    assert cursor.done and cursor.error is None


@pytest.mark.parametrize("division", [((), (1,)), ((0,), ()), ((0, 1), (1, 2))])
def test_a_division_gives_both_cores_that_are_not_shared(division):
    with pytest.raises(ValueError, match="disjoint"):
        CoreDivision(*division)


def test_who_leaves_lets_go_of_the_lanes_threads(two_cores, monkeypatch):
    """On more cores than here: a lane with threads of its own would hold up whoever computes elsewhere."""
    released = []
    monkeypatch.setattr(executors, "release_team", lambda: released.append(threading.current_thread().name))
    world = Mixed()
    streams, cursor = world.streams(), world.apart("tokens", None)
    streams._decode.threads = streams._prefill.threads = 2
    streams.run(world.batch, keep, cursor, 1.0)
    assert released == [threading.current_thread().name], "the caller's, as the lanes go on"
    streams.leave()
    assert sorted(released[1:]) == ["chunkc decode", "chunkc prefill"]
    streams.leave()
    assert len(released) == 3
    walk(cursor)
    assert cursor.error is None
