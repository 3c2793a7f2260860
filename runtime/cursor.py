"""A prefill that is not part of the batch: how far it is, by tokens and by layers.

In a mixed batch every layer makes the decodes wait for the chunk. A cursor takes prompts out of the batch. Its tokens
are cut into *pieces*, the model into parts (about a layer each), and what it does next is one part for one piece::

    tokens first             layers first
            part 0 1 2 3             part 0 1 2 3
    piece 0      1 2 3 4     piece 0      1 4 7 .
    piece 1      5 6 7 8     piece 1      2 5 8 .
    piece 2      9 . . .     piece 2      3 6 9 .

Tokens first is chunked prefill, launched apart: each piece ends before the next begins and reads the keys and values
of all earlier ones again, layer by layer. Layers first takes the whole prompt through a layer before the next, so
that no keys and values of a layer are read again once it is left; between two parts it keeps the hidden states of all
its tokens. Both end in the same cache and the same logits.

From its start to its end a cursor's requests hold on to their pages (see ``PagePool.pin``): a part may be running at
any moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from chunkc.runtime.batch import Chunk, PackedBatch, pack
from chunkc.runtime.fences import PASSED, Fence
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request

if TYPE_CHECKING:
    from chunkc.runtime.deferred_logits import Logits
    from chunkc.runtime.runner import Forward, ModelRunner

Order = Literal["tokens", "layers"]


@dataclass
class Piece:
    """Some of a cursor's tokens; they go through the model together.

    Attributes:
        chunks: the tokens, request by request.
        batch: the same as the model takes them.
        work: cost of one part, in tokens of a layer outside of attention (``ModelRunner.row_costs``).
        forward: their way through the model; None before its start and after its end.
        logits: [L, V] at the end, a row for each chunk that samples; None until then.
    """

    chunks: list[Chunk]
    batch: PackedBatch
    work: float
    forward: Forward | None = None
    logits: Logits | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return self.batch.num_tokens

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the chunks' starts, whose keys and values every layer reads."""
        return sum(chunk.start for chunk in self.chunks)

    @property
    def samplers(self) -> list[Request]:
        """The requests whose last token is here, in the order of ``logits``."""
        return [chunk.request for chunk in self.chunks if chunk.samples]


class PrefillCursor:
    """Prompts on their way through the model. Not safe for two threads at once.

    Args:
        runner: the model.
        pool: where the chunks' pages are; they must be there already, for all tokens.
        chunks: what to compute, at most one chunk a request.
        order: what comes first, see the module's text.
        piece_limit: most work of a piece in one part: tokens for ``"tokens"``, cost in tokens
            (``ModelRunner.row_costs``) for ``"layers"``; None does not cut.

    Attributes:
        chunks, order: as given.
        pieces: the chunks' tokens, cut.
        error: what the model raised; the cursor is then exhausted.
        parts_done: how many times a part has run for a piece, or was given to a device.
        fence: behind the latest part.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: PagePool,
        chunks: Sequence[Chunk],
        *,
        order: Order,
        piece_limit: float | None,
    ) -> None:
        self.chunks, self.order = list(chunks), order
        self.error: Exception | None = None
        self.parts_done = 0
        self.fence: Fence = PASSED
        self._runner, self._pool = runner, pool
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in chunks])
        costs = runner.row_costs(positions)
        ends = _cut(np.ones_like(costs) if order == "tokens" else costs, piece_limit)
        work = np.add.reduceat(costs, [0, *ends[:-1]])
        self.pieces = [
            Piece(some, pack(some, pool), float(cost))
            for some, cost in zip(_split(self.chunks, ends), work, strict=True)
        ]
        for chunk in self.chunks:
            pool.pin(chunk.request.row)
        self._rows = [chunk.request.row for chunk in self.chunks]
        self._steps = self._walk()
        self._next: Piece | None = next(self._steps, None)

    @property
    def requests(self) -> list[Request]:
        """Whose prompts these are."""
        return [chunk.request for chunk in self.chunks]

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing left for ``advance``, or no way to go on. A device may still be at it."""
        return self._next is None or self.error is not None

    @property
    def done(self) -> bool:
        """Whether all that there is to do has been done, or as much as was possible."""
        return self.exhausted and self.fence.passed()

    @property
    def next_piece(self) -> Piece | None:
        """The piece that ``advance`` works on; None when exhausted."""
        return None if self.error is not None else self._next

    def advance(self, record: Callable[[], Fence] = lambda: PASSED) -> None:
        """Runs one part for one piece, or gives it to a device. What the model raises is kept in ``error``.

        Args:
            record: gives a fence behind what this thread has given to the device.
        """
        piece = self.next_piece
        assert piece is not None
        try:
            if piece.forward is None:
                piece.forward = self._runner.start(piece.batch)
            piece.forward.advance()
            if piece.forward.next_part == piece.forward.num_parts:
                piece.logits, piece.forward = piece.forward.logits(), None
            self.fence = record()  # before others can see how far it is
        except Exception as error:
            self.fail(error, record)
            return
        self.parts_done += 1
        self._next = next(self._steps, None)

    def fail(self, error: Exception, record: Callable[[], Fence] = lambda: PASSED) -> None:
        """Gives up: no part follows. Something of the part that failed may be under way on the device."""
        with contextlib.suppress(Exception):  # a device that is broken has no fences either
            self.fence = record()
        self.error = error

    def close(self) -> None:
        """Lets go of the pages. Whatever uses them next comes behind ``fence``; call it once."""
        for row in self._rows:
            self._pool.unpin(row)
        for piece in self.pieces:
            piece.forward = None

    def _walk(self) -> Iterator[Piece]:
        parts = range(self._runner.num_parts)
        if self.order == "tokens":
            return (piece for piece in self.pieces for _ in parts)
        return (piece for _ in parts for piece in self.pieces)


def _cut(costs: np.ndarray, limit: float | None) -> list[int]:
    """Where rows are cut into the fewest pieces of equal cost below ``limit``, all this up to the cost of a row or two;
    the ends of the pieces, increasing."""
    reached = np.cumsum(costs)
    count = 1 if limit is None else min(len(costs), max(1, int(np.ceil(reached[-1] / limit - 1e-9))))
    ends = np.searchsorted(reached, reached[-1] * np.arange(1, count) / count, side="left") + 1
    return [*np.unique(ends[ends < len(costs)]).tolist(), len(costs)]


def _split(chunks: list[Chunk], ends: Sequence[int]) -> Iterator[list[Chunk]]:
    """The chunks' rows, one after another, up to each of ``ends``."""
    rest = list(reversed(chunks))
    begin = 0
    for end in ends:
        taken: list[Chunk] = []
        left = end - begin
        while left:
            chunk = rest.pop()
            middle = min(chunk.end, chunk.start + left)
            taken.append(Chunk(chunk.request, chunk.start, middle))
            left -= middle - chunk.start
            if middle < chunk.end:
                rest.append(Chunk(chunk.request, middle, chunk.end))
        yield taken
        begin = end
