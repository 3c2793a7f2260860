"""OpenMP's threads are given back by whoever stops computing."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from toy_runner import ToyRunner

from chunkc.config import SamplingParams
from chunkc.runtime.engine import Engine
from chunkc.runtime.teams import _pause_function, release_team

pytestmark = pytest.mark.skipif(
    _pause_function() is None or not os.path.isdir("/proc/self/task"), reason="needs OpenMP 5 and Linux"
)


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def compute() -> None:
    torch.ones(3_000_000).sum()


def in_a_thread(work) -> None:
    """Runs it in a thread with two OpenMP threads."""
    errors = []

    def run() -> None:
        try:
            torch.get_num_threads()
            work()
        except BaseException as error:
            errors.append(error)

    before = threads()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    end = time.monotonic() + 10
    while threads() > before and time.monotonic() < end:  # the thread's own team ends a little after it
        time.sleep(0.001)
    if errors:
        raise errors[0]


def test_a_released_team_is_gone_and_comes_back(two_cores):
    def work() -> None:
        before = threads()
        compute()
        assert threads() == before + 1
        release_team()
        assert threads() == before
        compute()
        assert threads() == before + 1

    in_a_thread(work)


class Computing(ToyRunner):
    """The toy, and some work for OpenMP's threads in each batch."""

    def start(self, batch):
        compute()
        return super().start(batch)


def test_a_call_that_has_ended_leaves_no_team(two_cores):
    engine = Engine(Computing(64, 4))
    engine.add_request([1], SamplingParams(max_new_tokens=200, ignore_eos=True))  # so that the engine is not idle

    def work() -> None:
        before = threads()
        engine.generate([1, 2, 3], SamplingParams(max_new_tokens=3))
        assert threads() == before

    in_a_thread(work)


def test_threads_that_take_turns_leave_no_team_behind(two_cores):
    engine = Engine(Computing(64, 4))
    engine.add_request([1], SamplingParams(max_new_tokens=200, ignore_eos=True))
    engine.step()

    def work() -> None:
        before = threads()
        engine.step()
        assert threads() == before
        engine.step()
        assert threads() == before + 1, "a thread that steps alone keeps its team"

    in_a_thread(work)
