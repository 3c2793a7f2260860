from __future__ import annotations

import threading
import time

import pytest
from toy_runner import ToyRunner, toy_generate

from chunkc.config import EngineConfig, SamplingParams
from chunkc.runtime.engine import Engine
from chunkc.runtime.locks import FairRLock


def in_threads(*functions) -> None:
    """Runs functions at the same time; fails with the first error of any."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("num_pages", [400, 40])
def test_streams_and_batches_from_many_threads(num_pages):
    engine = Engine(ToyRunner(num_pages, page_size=1), config=EngineConfig(budget=9))
    params = SamplingParams(max_new_tokens=15)

    def stream(n):
        for _ in range(4):
            tokens = [event.token_id for event in engine.stream([n, n], params)]
            assert tokens == toy_generate([n, n], params)

    def batch(n):
        for _ in range(4):
            done = engine.generate([[n], [n, n, n]], params)
            assert [c.token_ids for c in done] == [toy_generate([n], params), toy_generate([n] * 3, params)]

    def quit_early(n):
        for _ in range(8):
            with engine.stream([n], SamplingParams(max_new_tokens=30)) as events:
                next(events)

    in_threads(*[lambda n=n: stream(n) for n in range(3)], lambda: batch(5), lambda: batch(6), lambda: quit_early(9))
    engine.check()
    assert engine.pool.num_used == 0 and not engine.has_unfinished()


def test_a_busy_engine_lets_others_in():
    """An abort or a new request gets its turn after at most a step or two of a thread that never pauses."""
    runner = ToyRunner(400, 4)
    runner.before = lambda batch: time.sleep(0.002)
    engine = Engine(runner, config=EngineConfig(budget=16))
    waits = []

    def visitor():
        time.sleep(0.05)
        for _ in range(10):
            before = engine.metrics.steps
            engine.abort("nobody")
            waits.append(engine.metrics.steps - before)

    in_threads(lambda: engine.generate([[n] for n in range(3)], {"max_new_tokens": 150}), visitor)
    assert max(waits) <= 4


def test_the_lock_is_reentrant_and_fair():
    lock = FairRLock()
    order = []

    def worker(name):
        with lock, lock:
            order.append(name)

    with lock:
        threads = []
        for name in range(3):
            threads.append(threading.Thread(target=worker, args=(name,)))
            threads[-1].start()
            time.sleep(0.02)
        with lock:  # while others wait
            assert order == []
        assert not lock.try_enter(), "not for a finaliser inside the lock either"
    for thread in threads:
        thread.join(timeout=10)
    assert sorted(order) == [0, 1, 2]
    assert lock.try_enter()
    lock.__exit__(None, None, None)


def test_try_enter_does_not_wait():
    lock = FairRLock()
    with lock:
        got = []
        thread = threading.Thread(target=lambda: got.append(lock.try_enter()))
        thread.start()
        thread.join(timeout=10)
        assert got == [False]
