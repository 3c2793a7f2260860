"""Where the events of a request go, and the iterator that ``Engine.stream`` returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from chunkc.errors import ChunkcError
from chunkc.runtime.outputs import Completion, TokenEvent


class EventSink(Protocol):
    """Receives what happens to a request. Called while the engine's lock is held."""

    def put(self, event: TokenEvent) -> None:
        """A new token."""
        ...

    def close(self, completion: Completion) -> None:
        """The request has ended; its last event has been put."""
        ...


class Gather:
    """The sink of one ``generate`` call: only completions count.

    Attributes:
        completions: the requests that have ended, by id.
        num_tokens: tokens so far, of all requests.
    """

    def __init__(self) -> None:
        self.completions: dict[str, Completion] = {}
        self.num_tokens = 0

    def put(self, event: TokenEvent) -> None:
        """Counts a token."""
        self.num_tokens += event.token_id is not None

    def close(self, completion: Completion) -> None:
        """Keeps a completion."""
        self.completions[completion.request_id] = completion


class Feed:
    """The sink of one stream: keeps events until they are read. The engine holds this, never the stream, so
    that a stream nobody holds any more is collected.

    Attributes:
        events: not read yet.
        completion: set when the request has ended, after its last event was put.
    """

    def __init__(self) -> None:
        self.events: deque[TokenEvent] = deque()
        self.completion: Completion | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether the engine has to go on before there is another event."""
        return not self.events and self.completion is None

    def put(self, event: TokenEvent) -> None:
        """Keeps a token."""
        if event.error is None:
            self.events.append(event)

    def close(self, completion: Completion) -> None:
        """Keeps the completion; no token follows an abort."""
        if completion.finish_reason == "abort":
            self.events.clear()
        self.completion = completion


class TokenStream:
    """Iterator over the events of one request; drives the engine while it waits for its own.

    Closing it early, leaving its ``with`` block or dropping it aborts the request.

    Args:
        request_id: the request.
        feed: where the engine puts its events.
        advance: runs a step if the feed is still waiting.
        drop: aborts the request; its second argument says whether it may block.

    Raises:
        ChunkcError: from ``next``, when the request has failed.
    """

    def __init__(
        self,
        request_id: str,
        feed: Feed,
        advance: Callable[[Feed], None],
        drop: Callable[[str, bool], None],
    ) -> None:
        self.request_id = request_id
        self._feed, self._advance, self._drop = feed, advance, drop
        self._over = False

    @property
    def completion(self) -> Completion | None:
        """The request's completion once it has ended, else None."""
        return self._feed.completion

    def close(self) -> None:
        """Ends the stream; aborts the request if it is unfinished."""
        self._over = True
        if self._feed.completion is None:
            self._drop(self.request_id, True)

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> TokenEvent:
        feed = self._feed
        while not self._over:
            # Looked at before the events: what was put before the end is then read before the end.
            completion = feed.completion
            try:
                return feed.events.popleft()
            except IndexError:
                pass
            if completion is None:
                self._advance(feed)
                continue
            self._over = True
            if completion.finish_reason == "error":
                raise ChunkcError(f"request {self.request_id!r} failed: {completion.error}")
        raise StopIteration

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._feed.completion is None and not self._over:
            self._drop(self.request_id, False)
