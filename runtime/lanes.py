"""Threads with cores of their own, so that two batches can be computed at the same time.

A lane is a Python thread that is bound to some cores and has as many OpenMP threads, which inherit the binding. Two
lanes with disjoint cores share memory and caches, and nothing else: compiled parts run without the GIL.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
_Work = tuple[Callable[[], Any], "Future[Any]"]


def available_cores() -> list[int]:
    """The cores this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class Lane:
    """A thread that does one piece of work after another, on its own cores.

    Args:
        name: of the thread.
        cores: to run on; one OpenMP thread each.

    The thread ends with the lane, or with the process; what is running then is asked to stop by ``stopping``.
    """

    def __init__(self, name: str, cores: Sequence[int]) -> None:
        self.name, self.cores = name, tuple(cores)
        #: set when the lane is being closed; long work looks at it between its parts
        self.stopping = threading.Event()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        ready: Future[None] = Future()
        # The thread knows the queue, not the lane: a lane that nobody holds can be collected.
        thread = threading.Thread(
            target=_serve, args=(self._work, self.cores, ready), name=f"chunkc {name}", daemon=True
        )
        # torch takes the number that was set last as every new thread's default: it must stay what the caller has.
        threads = torch.get_num_threads()
        thread.start()
        try:
            ready.result()
        finally:
            torch.set_num_threads(threads)
        self.close = weakref.finalize(self, _close, self._work, self.stopping, thread)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Does ``work`` after what was submitted before."""
        future: Future[Result] = Future()
        self._work.put((work, future))
        return future


def _serve(work: queue.SimpleQueue[_Work | None], cores: tuple[int, ...], ready: Future[None]) -> None:
    try:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, cores)
        # A thread's first look at the number sets it to what is set for all, so that has to come before.
        torch.get_num_threads()
        torch.set_num_threads(len(cores))
    except Exception as error:
        ready.set_exception(error)
        return
    ready.set_result(None)
    while (item := work.get()) is not None:
        call, future = item
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        # Not held until there is more to do: the results are somebody else's memory.
        del item, call, future


def _close(work: queue.SimpleQueue[_Work | None], stopping: threading.Event, thread: threading.Thread) -> None:
    stopping.set()
    work.put(None)
    if thread is not threading.current_thread():
        thread.join()
