"""Threads with cores of their own."""

from __future__ import annotations

import gc
import os
import threading
import weakref

import pytest
import torch

from chunkc.runtime.lanes import Lane
from chunkc.runtime.thread_limits import available_cores


@pytest.fixture
def lane():
    made = Lane("test", available_cores()[:1])
    yield made
    made.close()


def test_work_runs_on_the_lanes_cores_with_a_thread_for_each(lane):
    cores, threads, name = lane.submit(
        lambda: (os.sched_getaffinity(0), torch.get_num_threads(), threading.current_thread().name)
    ).result()
    assert (cores, threads, name) == (set(lane.cores), 1, "chunkc test")
    assert os.sched_getaffinity(0) == set(available_cores()), "the caller's cores are its own"


def test_lane_and_other_threads_have_their_number_of_threads(two_cores):
    lane = Lane("test", available_cores()[:1])
    assert torch.get_num_threads() == 2
    assert lane.submit(torch.get_num_threads).result() == 1
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [2]
    lane.close()


def test_work_is_done_in_order_and_errors_are_passed_on(lane):
    done = []
    futures = [lane.submit(lambda number=number: done.append(number)) for number in range(20)]
    failing = lane.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert done == list(range(20)) and all(future.done() for future in futures)
    assert lane.submit(lambda: 3).result() == 3


def test_a_lane_that_nobody_holds_ends_its_thread():
    lane = Lane("dropped", available_cores()[:1])
    gone = weakref.ref(lane)
    thread = next(t for t in threading.enumerate() if t.name == "chunkc dropped")
    del lane
    gc.collect()
    assert gone() is None
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_lane_keeps_nothing_of_its_last_work(lane):
    class Big:
        pass

    big = Big()
    gone = weakref.ref(big)
    lane.submit(lambda big=big: None).result()
    del big
    lane.submit(lambda: None).result()
    gc.collect()
    assert gone() is None


def test_cores_that_do_not_exist_are_an_error():
    with pytest.raises(OSError):
        Lane("test", [100_000])
