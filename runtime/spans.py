"""What ran where and when, for the trace of a run."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chunkc.runtime.cursor import PrefillCursor

MAX_SPANS = 65_536  # the latest are kept


@dataclass(frozen=True, slots=True)
class Span:
    """Something that ran without a break.

    Attributes:
        lane: where, "all cores", "decode cores" or "prefill cores".
        name: what, "batch" or "prefill".
        start, end: in seconds, on the engine's clock.
        tokens: in the batch, or in the piece of the prefill that was first.
        parts: for a prefill, how many times a part ran for a piece.
    """

    lane: str
    name: str
    start: float
    end: float
    tokens: int
    parts: int | None = None


class SpanLog:
    """The latest spans, oldest first. Threads may add at the same time."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._lock = threading.Lock()  # a copy must not meet a span that is being added

    def add(self, span: Span) -> None:
        """Notes a span."""
        with self._lock:
            self._spans.append(span)

    @contextmanager
    def of_prefill(self, lane: str, cursor: PrefillCursor, clock: Callable[[], float]) -> Iterator[None]:
        """Notes what a cursor, which is not done, does in the ``with`` block."""
        began, before, piece = clock(), cursor.parts_done, cursor.next_piece
        assert piece is not None
        try:
            yield
        finally:
            self.add(Span(lane, "prefill", began, clock(), piece.num_tokens, cursor.parts_done - before))

    def all(self) -> tuple[Span, ...]:
        """The spans so far."""
        with self._lock:
            return tuple(self._spans)

    def clear(self) -> None:
        """Forgets them."""
        with self._lock:
            self._spans.clear()
