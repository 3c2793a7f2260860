"""Stand-ins for ``torch.cuda`` and for the driver's calls that cut SMs, which write down what they are asked."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any


class ToyCuda:
    """``torch.cuda`` as far as lanes use it. ``calls``: what was asked, in order."""

    def __init__(self, sms: int = 132) -> None:
        self.calls: list[tuple] = []
        self.sms = sms
        self._thread = threading.local()
        cuda = self

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                assert blocking
                self.has_passed = False

            def record(self, stream: ToyStream) -> None:
                cuda.calls.append(("record", stream.name, self))

            def query(self) -> bool:
                return self.has_passed

            def synchronize(self) -> None:
                cuda.calls.append(("synchronize", self))
                self.has_passed = True

        class ToyStream:
            def __init__(self, device: Any = None, priority: int = 0) -> None:
                self.device, self.priority = device, priority
                self.name = f"stream {sum(call[0] == 'Stream' for call in cuda.calls)}"
                self.cuda_stream = hash(self.name)
                cuda.calls.append(("Stream", self.name, priority))

            def wait_event(self, event: Event) -> None:
                cuda.calls.append(("wait", self.name, event))

        self.Event, self.Stream = Event, ToyStream

    def current_device(self) -> int:
        return 3

    def synchronize(self, device: Any) -> None:
        self.calls.append(("synchronize device",))

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(multi_processor_count=self.sms, name="toy", major=9)

    def set_device(self, device: Any) -> None:
        self._thread.device = device

    def set_stream(self, stream: Any) -> None:
        self._thread.stream = stream

    def current_stream(self, device: Any = None) -> Any:
        return self._thread.stream

    @contextmanager
    def stream(self, stream: Any):
        before = getattr(self._thread, "stream", None)
        self._thread.stream = stream
        yield
        self._thread.stream = before


class Status(int):
    """A driver's result."""

    @property
    def name(self) -> str:
        return "CUDA_SUCCESS" if self == 0 else f"CUDA_ERROR_{int(self)}"


class ToyDriver:
    """``cuda.bindings.driver`` as far as it cuts SMs, in steps of ``step``. ``failing``: calls that fail."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM=1)
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, sms: int = 132, step: int = 8, failing: tuple[str, ...] = ()) -> None:
        self.sms, self.step, self.failing = sms, step, failing
        self.contexts: list[tuple[int, int]] = []  # ranges of SMs

    def _status(self, name: str) -> Status:
        return Status(801 if name in self.failing else 0)

    def cuDeviceGet(self, index: int) -> tuple:
        return self._status("cuDeviceGet"), f"device {index}"

    def cuDeviceGetDevResource(self, device: str, kind: int) -> tuple:
        return self._status("cuDeviceGetDevResource"), _resource(0, self.sms)

    def cuDevSmResourceSplitByCount(self, groups: int, resource: Any, flags: int, least: int) -> tuple:
        assert (groups, flags) == (1, 0)
        size = -(-least // self.step) * self.step
        group, rest = _resource(0, size), _resource(size, resource.sm.smCount - size)
        return self._status("cuDevSmResourceSplitByCount"), [group], 1, rest

    def cuDevResourceGenerateDesc(self, resources: list, count: int) -> tuple:
        assert len(resources) == count == 1
        return self._status("cuDevResourceGenerateDesc"), resources[0]

    def cuGreenCtxCreate(self, resource: Any, device: str, flags: int) -> tuple:
        assert flags == 1
        self.contexts.append((resource.begin, resource.begin + resource.sm.smCount))
        return self._status("cuGreenCtxCreate"), len(self.contexts)

    def cuGreenCtxStreamCreate(self, context: int, flags: int, priority: int) -> tuple:
        assert flags == 1
        return self._status("cuGreenCtxStreamCreate"), 100 + context


def _resource(begin: int, count: int) -> Any:
    return SimpleNamespace(begin=begin, sm=SimpleNamespace(smCount=count))
