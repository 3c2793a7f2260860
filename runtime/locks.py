"""A reentrant lock that threads get in the order they ask for it."""

from __future__ import annotations

import threading
from types import TracebackType


class FairRLock:
    """Like ``threading.RLock``, and a thread that releases it cannot take it again before one that waits.

    A thread that generates takes the engine's lock for every step, with nothing in between; with an RLock it
    would mostly win against a thread that wants to add or abort a request.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._turnstile = threading.Lock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> FairRLock:
        me = threading.get_ident()
        if self._owner == me:
            # Not through the turnstile: whoever stands in it waits for us.
            self._lock.acquire()
        else:
            with self._turnstile:
                self._lock.acquire()
            self._owner = me
        self._depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()

    def try_enter(self) -> bool:
        """Takes the lock if nobody holds it or waits for it, this thread included. Never blocks.

        For finalisers: they run at any moment, also inside the methods above. To be undone with ``__exit__``.
        """
        if self._owner is not None or not self._turnstile.acquire(blocking=False):
            return False
        try:
            if not self._lock.acquire(blocking=False):
                return False
        finally:
            self._turnstile.release()
        self._owner = threading.get_ident()
        self._depth = 1
        return True
