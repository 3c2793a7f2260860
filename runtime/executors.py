"""How a batch and a prefill that is apart from it are computed: one after the other, or at the same time.

    inline    |batch        |slice of the prefill|batch        |slice ...          all cores for each
    streams   |batch   |batch   |batch   |batch   |batch       ...                 some cores
              |part|part|part|part|part|part|part|part|part|part|part ...          the others

A batch is one launch through the whole model: decodes, and prefill chunks where prefill is not apart. The caller asks
for a batch and has what it makes of the logits when ``run`` returns; how far the prefill came meanwhile, the cursor
knows.

Whatever computes on tensors goes through here, sampling too: a thread that takes all cores for an instant makes both
lanes wait for it, as each of its cores is somebody else's.

On a device all this is said of streams (see ``fences.py``): the caller's own, ``Machine.whole``, and one a lane. Each
batch starts behind what the caller's stream was given, and the caller's stream goes on behind the batch. A prefill
starts behind the caller's stream, too, but that waits for the prefill only where the two meet again: where the cursor
joins, or goes on inline. So the decodes never wait for the prefill, pages that were given back are written to only
behind their last reader, and a request decodes only behind its prefill.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Protocol, TypeVar

from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.cursor import PrefillCursor
from chunkc.runtime.fences import Fence
from chunkc.runtime.machine import CORES, Division, Machine
from chunkc.runtime.spans import Span, SpanLog
from chunkc.runtime.teams import release_team

if TYPE_CHECKING:
    from chunkc.runtime.deferred_logits import Logits
    from chunkc.runtime.runner import ModelRunner

Result = TypeVar("Result")
#: parts that a device has been given and not done, at most; a prefill that is stopped ends with them
AHEAD = 4


class Executor(Protocol):
    """Computes. One thread at a time calls it."""

    def run(
        self,
        batch: PackedBatch | None,
        use: Callable[[Logits], Result],
        cursor: PrefillCursor | None,
        work: float | None,
    ) -> Result | None:
        """Computes the batch, and goes on with the cursor's prefill.

        Args:
            batch: None where nobody decodes.
            use: called with the batch's logits [L, V], on the cores that computed them.
            cursor: None where no prefill is apart.
            work: how much of the prefill goes with one batch, in tokens through the whole model
                (``Piece.work``), if they are computed in turns; None for all that is left.

        Returns:
            What ``use`` returned, for the caller's stream; None without a batch.

        Raises:
            Exception: what the model or ``use`` raised. What the model raised for the prefill is the cursor's
                ``error``.
        """

    def compute(self, call: Callable[[], Result]) -> Result:
        """Calls on the cores where a batch would run, and returns or raises what the call does."""

    def settle(self) -> None:
        """Returns when no part of any cursor is being started, and until the next ``run`` none is. What the caller's
        stream is given next comes behind those that were."""

    def leave(self) -> None:
        """Settles, and lets go of threads that would hold up others, as another executor goes on."""


class Inline:
    """On the caller's thread and all its cores: the batch, then a slice of the prefill."""

    def __init__(
        self,
        runner: ModelRunner,
        spans: SpanLog,
        clock: Callable[[], float] = time.perf_counter,
        machine: Machine = CORES,
    ) -> None:
        self._runner, self._spans, self._clock = runner, spans, clock
        self._whole = machine.whole

    def run(
        self,
        batch: PackedBatch | None,
        use: Callable[[Logits], Result],
        cursor: PrefillCursor | None,
        work: float | None,
    ) -> Result | None:
        """See ``Executor``. At least one part of the prefill runs, so that it comes to its end."""
        result = None
        if batch is not None:
            began = self._clock()
            result = use(self._runner.run(batch))
            self._spans.add(Span("all cores", "batch", began, self._clock(), batch.num_tokens))
        if cursor is not None and not cursor.exhausted:
            left = None if work is None else work * self._runner.num_parts
            with self._spans.of_prefill("all cores", cursor, self._clock):
                while (piece := cursor.next_piece) is not None:
                    cursor.advance(self._whole.record)
                    if left is not None:
                        left -= piece.work
                        coming = cursor.next_piece
                        if coming is None or left < coming.work / 2:  # nearer to what was asked for without it
                            break
        if cursor is not None and cursor.exhausted:
            cursor.fence.wait()
        return result

    def compute(self, call: Callable[[], Result]) -> Result:
        """See ``Executor``."""
        return call()

    def settle(self) -> None:
        """Nothing runs between two calls of ``run``."""

    def leave(self) -> None:
        """See ``Executor``. The threads are the caller's, and whoever goes on elsewhere sees to them."""


class Streams:
    """Batch and prefill at the same time, each on cores of its own; inline where there is but one of them.

    The prefill runs on after ``run`` has returned. ``run`` waits for it only where it goes on inline, that is for
    the one part that is running (on a device, for at most ``AHEAD`` parts more).
    """

    def __init__(
        self,
        runner: ModelRunner,
        division: Division,
        spans: SpanLog,
        clock: Callable[[], float] = time.perf_counter,
        machine: Machine = CORES,
    ) -> None:
        self.division = division
        self._runner, self._spans, self._clock = runner, spans, clock
        self._inline = Inline(runner, spans, clock, machine)
        self._whole = machine.whole
        self._decode, self._prefill = machine.lanes(division)
        self._cursor: PrefillCursor | None = None
        self._under_way: Future[None] | None = None
        self._pause = False
        self._in_lanes = False

    def run(
        self,
        batch: PackedBatch | None,
        use: Callable[[Logits], Result],
        cursor: PrefillCursor | None,
        work: float | None,
    ) -> Result | None:
        """See ``Executor``."""
        if batch is None or cursor is None or cursor.done:
            self.settle()
            self._move(to_lanes=False)
            return self._inline.run(batch, use, cursor, work)
        self._move(to_lanes=True)
        ready = self._whole.record()
        busy = self._cursor is cursor and self._under_way is not None and not self._under_way.done()
        if not busy and not cursor.exhausted:
            self._pause, self._cursor = False, cursor
            self._prefill.wait(ready)
            self._under_way = self._prefill.submit(lambda: self._advance(cursor))
        return self._on_decode(lambda: self._run(batch, use), ready)

    def compute(self, call: Callable[[], Result]) -> Result:
        """See ``Executor``."""
        return self._on_decode(call, self._whole.record())

    def _on_decode(self, call: Callable[[], Result], ready: Fence) -> Result:
        self._decode.wait(ready)
        future = self._decode.submit(call)
        try:
            return future.result()
        finally:
            wait([future])  # an interrupt must not leave a batch behind whose pages are about to be given back
            self._whole.wait(self._decode.record())

    def settle(self) -> None:
        """See ``Executor``."""
        if self._under_way is not None:
            self._pause = True
            wait([self._under_way])
            self._under_way = self._cursor = None
            self._whole.wait(self._prefill.record())

    def leave(self) -> None:
        """See ``Executor``."""
        self.settle()
        self._move(to_lanes=False)

    def _move(self, *, to_lanes: bool) -> None:
        """Lets go of the OpenMP threads of where nothing is computed from now on, see ``teams``."""
        if to_lanes == self._in_lanes:
            return
        self._in_lanes = to_lanes
        if to_lanes:
            release_team()
        else:
            wait([lane.submit(release_team) for lane in (self._decode, self._prefill) if lane.threads > 1])

    def _run(self, batch: PackedBatch, use: Callable[[Logits], Result]) -> Result:
        began = self._clock()
        result = use(self._runner.run(batch))
        self._spans.add(Span("decode cores", "batch", began, self._clock(), batch.num_tokens))
        return result

    def _advance(self, cursor: PrefillCursor) -> None:
        def may_go_on() -> bool:
            return not (self._pause or cursor.exhausted or self._prefill.stopping.is_set())

        given: deque[Fence] = deque()
        while may_go_on():
            piece = cursor.next_piece
            with self._spans.of_prefill("prefill cores", cursor, self._clock):
                while cursor.next_piece is piece and may_go_on():
                    cursor.advance(self._prefill.record)
                    given.append(cursor.fence)
                    if len(given) > AHEAD:
                        self._wait(given.popleft(), cursor)

    def _wait(self, fence: Fence, cursor: PrefillCursor) -> None:
        """Has the prefill's thread wait. A part that broke on the device is the cursor's error."""
        try:
            fence.wait()
        except Exception as error:
            cursor.fail(error, self._prefill.record)
