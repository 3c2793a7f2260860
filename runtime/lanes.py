"""Threads with cores of their own, so that two batches can be computed at the same time.

A lane is a Python thread that is bound to some cores and has as many OpenMP threads, which inherit the binding. Two
lanes with disjoint cores share memory and caches, and nothing else: compiled parts run without the GIL.

A lane is a ``Stream`` too (see ``fences.py``). Here work has ended when its future has, so there is nothing to wait
for; lanes that give their work to a device (``cuda_lanes.py``) have it otherwise.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from chunkc.runtime.fences import Immediate

Result = TypeVar("Result")
_Work = tuple[Callable[[], Any], "Future[Any]"]


class Worker(Immediate):
    """A thread that does one piece of work after another.

    Args:
        name: of the thread.
        enter: called in the thread first; what it raises, this raises.

    The thread ends with the worker, or with the process; what is running then is asked to stop by ``stopping``.
    ``record`` and ``wait`` are for the worker's own work, and for others while it has none.

    Attributes:
        threads: that compute for it, OpenMP's included.
    """

    threads = 1

    def __init__(self, name: str, enter: Callable[[], None]) -> None:
        self.name = name
        #: set when the worker is being closed; long work looks at it between its parts
        self.stopping = threading.Event()
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        ready: Future[None] = Future()
        # The thread knows the queue, not the worker: a worker that nobody holds can be collected.
        thread = threading.Thread(target=_serve, args=(self._work, enter, ready), name=f"chunkc {name}", daemon=True)
        thread.start()
        ready.result()
        self.close = weakref.finalize(self, _close, self._work, self.stopping, thread)

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Does ``work`` after what was submitted before."""
        future: Future[Result] = Future()
        self._work.put((work, future))
        return future


class Lane(Worker):
    """A worker on its own cores.

    Args:
        name: of the thread.
        cores: to run on; one OpenMP thread each.
    """

    def __init__(self, name: str, cores: Sequence[int]) -> None:
        self.cores, self.threads = tuple(cores), len(cores)
        # torch takes the number that was set last as every new thread's default: it must stay what the caller has.
        threads = torch.get_num_threads()
        try:
            super().__init__(name, functools.partial(_bind, self.cores))
        finally:
            torch.set_num_threads(threads)


def _bind(cores: tuple[int, ...]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    # A thread's first look at the number sets it to what is set for all, so that has to come before.
    torch.get_num_threads()
    torch.set_num_threads(len(cores))


def _serve(work: queue.SimpleQueue[_Work | None], enter: Callable[[], None], ready: Future[None]) -> None:
    try:
        enter()
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
