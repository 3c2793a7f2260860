"""A device that does what it is given as late and in as odd an order as the fences allow, and finds what they miss.

The toy model runs on it. Work is only queued when it is given; it is done when the host waits for it or looks at a
fence, and then the streams take turns at random. Beside that, every access is checked when it is queued: two accesses
to a slot of the cache, one of them a write, must be ordered by streams and fences alone (vector clocks), whatever the
host happened to wait for. What is found is in ``races``.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from toy_runner import ToyForward, ToyRunner

from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.engine import Engine
from chunkc.runtime.lanes import Worker
from chunkc.runtime.request import Request
from chunkc.runtime.sampling import Sampled, Sampler

NAMES = ("whole", "decode", "prefill")
SECONDS = 20


@dataclass
class ToyFence:
    """See ``Fence``. ``clock``: how far each stream is in front of it."""

    device: ToyDevice
    clock: list[int]
    has_passed: bool = False

    def passed(self) -> bool:
        with self.device.lock:
            self.device.do_some()
            return self.has_passed

    def wait(self) -> None:
        self.device.do_until(lambda: self.has_passed)


@dataclass
class ToyStream:
    """See ``Stream``. ``ignores``: whether to forget about the fences it is to wait for."""

    device: ToyDevice
    number: int
    queue: deque[Callable[[], object] | ToyFence] = field(default_factory=deque)
    clock: list[int] = field(default_factory=lambda: [0] * len(NAMES))
    ignores: Callable[[ToyFence], bool] = lambda fence: False
    held: bool = False

    def record(self) -> ToyFence:
        with self.device.lock:
            fence = ToyFence(self.device, self.clock.copy())
            self.queue.append(lambda: setattr(fence, "has_passed", True))
            self.device.log.append((NAMES[self.number], "record", fence))
            return fence

    def wait(self, fence: ToyFence) -> None:
        with self.device.lock:
            self.device.log.append((NAMES[self.number], "wait", fence))
            if fence.device is self.device and not self.ignores(fence):
                self.queue.append(fence)
                self.clock = [max(pair) for pair in zip(self.clock, fence.clock, strict=True)]

    def give(self, work: Callable[[], object], what: str) -> None:
        with self.device.lock:
            self.clock[self.number] += 1
            self.queue.append(work)
            self.device.log.append((NAMES[self.number], what, None))

    def do_next(self) -> bool:
        """Does one thing, if there is one that may be done."""
        if self.held or not self.queue:
            return False
        item = self.queue[0]
        if isinstance(item, ToyFence):
            if not item.has_passed:
                return False
            self.queue.popleft()
            return True
        self.queue.popleft()
        try:
            item()
        except Exception as error:
            self.device.failures.append(error)
        return True


class ToyLane(Worker):
    """A lane that gives its work to a stream."""

    def __init__(self, name: str, stream: ToyStream) -> None:
        self.stream = stream
        super().__init__(name, lambda: stream.device.enter(stream))

    def record(self) -> ToyFence:
        return self.stream.record()

    def wait(self, fence: ToyFence) -> None:
        self.stream.wait(fence)


@dataclass(frozen=True)
class ToyDivision:
    decode_units: int = 1

    def __str__(self) -> str:
        return "1 + 1"


class ToyDevice:
    """See the module's text; a ``Machine``.

    Attributes:
        races: accesses that nothing orders.
        failures: what the work raised when it was done.
        log: (stream, what, fence) of all that was given.
    """

    def __init__(self, seed: int = 0) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.random = random.Random(seed)
        self.streams = [ToyStream(self, number) for number in range(len(NAMES))]
        self.whole, self.decode, self.prefill = self.streams
        self.races: list[str] = []
        self.failures: list[Exception] = []
        self.log: list[tuple[str, str, ToyFence | None]] = []
        self._thread = threading.local()

    @property
    def current(self) -> ToyStream:
        """The stream that the calling thread gives its work to."""
        return self._thread.stream

    def enter(self, stream: ToyStream) -> None:
        self._thread.stream = stream

    @contextmanager
    def active(self) -> Iterator[None]:
        before = getattr(self._thread, "stream", None)
        self.enter(self.whole)
        try:
            yield
        finally:
            self.enter(before)

    def divisions(self) -> list[ToyDivision]:
        return [ToyDivision()]

    def lanes(self, division: ToyDivision) -> tuple[ToyLane, ToyLane]:
        return ToyLane("decode", self.decode), ToyLane("prefill", self.prefill)

    # ---- doing the work -------------------------------------------------------------------------------

    def do_some(self) -> bool:
        """A few steps of streams drawn at random; False if nothing can be done."""
        with self.lock:
            done = False
            for _ in range(self.random.randint(1, 4)):
                done |= any(stream.do_next() for stream in self.random.sample(self.streams, len(self.streams)))
            if done:
                self.changed.notify_all()
            return done

    def do_until(self, reached: Callable[[], bool]) -> None:
        with self.lock:
            while not reached():
                if not self.do_some():
                    assert self.changed.wait(SECONDS), "the device hangs: a fence that nobody can pass"

    def release(self, stream: ToyStream) -> None:
        """Goes on with a stream that was held."""
        with self.lock:
            stream.held = False
            self.changed.notify_all()

    def check(self) -> None:
        """That nothing was found."""
        with self.lock:
            assert not self.races, self.races[:3]
            assert not self.failures, self.failures[:3]


class DeviceRunner(ToyRunner):
    """The toy model on a toy device."""

    def __init__(self, device: ToyDevice, num_pages: int = 64, page_size: int = 4, max_positions: int = 4096) -> None:
        super().__init__(num_pages, page_size, max_positions)
        self.machine = self.device = device
        shape = (self.num_parts, num_pages * page_size)
        self.written = np.zeros((2, *shape), dtype=np.int64)  # stream, and its time
        self.read = np.zeros((len(NAMES), *shape), dtype=np.int64)  # time, by stream

    def start(self, batch: PackedBatch) -> DeviceForward:
        return DeviceForward(self, super().start(batch), batch)

    def with_pages(self, num_pages: int) -> DeviceRunner:
        return DeviceRunner(self.device, num_pages, self.page_size, self.max_positions)

    def access(self, part: int, batch: PackedBatch) -> None:
        """Checks and notes what a part that was just given to the current stream reads and writes."""
        device, meta = self.device, batch.attention
        stream = device.current
        clock, now = np.array(stream.clock), stream.clock[stream.number]
        offsets = np.arange(self.page_size)
        for row, kv_len in enumerate(meta.kv_lens.tolist()):
            pages = meta.page_table[row, : -(-kv_len // self.page_size)].numpy()
            slots = (pages[:, None] * self.page_size + offsets).reshape(-1)[:kv_len]
            self._find(part, slots, clock, NAMES[stream.number], "reads")
            self.read[stream.number, part, slots] = now
        slots = meta.slot_mapping.numpy()
        self._find(part, slots, clock, NAMES[stream.number], "writes")
        for other in range(len(NAMES)):
            if (self.read[other, part, slots] > clock[other]).any():
                device.races.append(f"{NAMES[stream.number]} writes what {NAMES[other]} reads")
        self.written[0, part, slots], self.written[1, part, slots] = stream.number, now

    def _find(self, part: int, slots: np.ndarray, clock: np.ndarray, name: str, does: str) -> None:
        who, when = self.written[0, part, slots], self.written[1, part, slots]
        for other in np.unique(who[when > clock[who]]):
            self.device.races.append(f"{name} {does} what {NAMES[other]} writes")


class DeviceForward:
    """A ``Forward`` whose parts are only queued."""

    def __init__(self, runner: DeviceRunner, forward: ToyForward, batch: PackedBatch) -> None:
        self.num_parts, self.next_part = runner.num_parts, 0
        self._runner, self._forward, self._batch = runner, forward, batch
        self._last: tuple[int, int] | None = None
        self._logits = torch.full((len(batch.logits_rows), runner.vocab_size), float("nan"))

    def advance(self) -> None:
        runner, device = self._runner, self._runner.device
        with device.lock:
            stream = device.current
            stream.give(self._do, f"part {self.next_part} of {self._batch.num_tokens}")
            ordered(device, stream, self._last, "goes on with what")
            runner.access(self.next_part, self._batch)
            self._last = (stream.number, stream.clock[stream.number])
            self.next_part += 1

    def _do(self) -> None:
        self._forward.advance()
        if self._forward.next_part == self.num_parts:
            self._logits.copy_(self._forward.logits())

    def logits(self) -> torch.Tensor:
        self._logits.made = self._last  # type: ignore[attr-defined]
        return self._logits


def ordered(device: ToyDevice, stream: ToyStream, made: tuple[int, int] | None, does: str) -> None:
    if made is not None and made[1] > stream.clock[made[0]]:
        device.races.append(f"{NAMES[stream.number]} {does} {NAMES[made[0]]} writes")


class DeviceSampler(Sampler):
    """Waits for the stream it is called on, as reading logits from a device does; checks that these come before."""

    def __init__(self, device: ToyDevice) -> None:
        super().__init__()
        self.device = device

    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> Sampled:
        device = self.device
        stream = device.current
        assert stream is not device.prefill
        with device.lock:
            ordered(device, stream, logits.made, "samples from what")  # type: ignore[attr-defined]
        stream.record().wait()
        return super().sample(logits, requests)


def device_engine(device: ToyDevice, *, num_pages: int = 64, page_size: int = 4, **options) -> Engine:
    engine = Engine(DeviceRunner(device, num_pages, page_size), **options)
    engine._core._sampler = DeviceSampler(device)
    return engine
