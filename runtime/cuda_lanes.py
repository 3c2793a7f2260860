"""A GPU as a ``Machine``: a CUDA stream for the whole of it, and pairs of streams that share it or divide its SMs.

A lane is a thread, as on the host, that gives its work to a stream of its own. Where the driver can, the two streams
of a pair have disjoint sets of SMs (see ``sm_partition.py``); elsewhere both run wherever there is room. Pairs are made
once for each division and kept, as green contexts are slow to make.

This has not run on a GPU yet: its tests put recording stand-ins in the place of ``torch.cuda``.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from chunkc.kernels import device as device_models
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.runtime.fences import Fence
from chunkc.runtime.lanes import Worker
from chunkc.runtime.sm_partition import Partitioner, PartitionError, SmDivision
from chunkc.runtime.step_inputs import DeviceInputs, StepInputs


class CudaFence:
    """An event behind what a stream was given. See ``Fence``."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def passed(self) -> bool:
        """Whether the device has come to the event."""
        return self.event.query()

    def wait(self) -> None:
        """Has the calling thread sleep until the device has."""
        self.event.synchronize()


class CudaStream:
    """A CUDA stream. See ``Stream``.

    Args:
        stream: torch's.
        cuda: ``torch.cuda``, or what stands in for it.
    """

    def __init__(self, stream: Any, cuda: Any = torch.cuda) -> None:
        self.stream, self._cuda = stream, cuda

    def record(self) -> CudaFence:
        """See ``Stream``."""
        event = self._cuda.Event(blocking=True)  # a thread that waits must not take the core of one that works
        event.record(self.stream)
        return CudaFence(event)

    def wait(self, fence: Fence) -> None:
        """See ``Stream``; for another device's fence, or none's, the calling thread waits."""
        if isinstance(fence, CudaFence):
            self.stream.wait_event(fence.event)
        else:
            fence.wait()


class CudaLane(Worker):
    """A worker that gives what it does to a stream.

    Args:
        name: of the thread.
        stream: the stream, current in the thread.
        sms: how many SMs that has.
        machine: whose lane it is.
    """

    def __init__(self, name: str, stream: CudaStream, sms: int, machine: CudaMachine) -> None:
        self.stream = stream
        super().__init__(name, lambda: machine.enter(stream, sms))

    def record(self) -> CudaFence:
        """See ``Stream``."""
        return self.stream.record()

    def wait(self, fence: Fence) -> None:
        """See ``Stream``."""
        self.stream.wait(fence)


class CudaMachine:
    """See ``Machine``.

    Args:
        device: the GPU.
        cuda: ``torch.cuda``, or what stands in for it.
        partitioner: cuts the SMs; made unless given.

    Raises:
        RuntimeError: torch finds no such device.
    """

    def __init__(self, device: torch.device, *, cuda: Any = torch.cuda, partitioner: Any = None) -> None:
        index = device.index if device.index is not None else cuda.current_device()
        self.device = torch.device(device.type, index)
        self._cuda, self._partitioner = cuda, partitioner
        cuda.synchronize(self.device)  # what made the weights may have been given to any stream
        self._properties = cuda.get_device_properties(self.device)
        self.whole = CudaStream(cuda.Stream(self.device), cuda)
        self._pairs: dict[SmDivision, tuple[tuple[CudaStream, int], tuple[CudaStream, int]]] = {}
        self._divisions: list[SmDivision] | None = None
        self._thread = threading.local()

    @property
    def num_sms(self) -> int:
        """SMs of the device."""
        return self._properties.multi_processor_count

    @property
    def units(self) -> int:
        """SMs that the calling thread's work has."""
        return getattr(self._thread, "sms", self.num_sms)

    @property
    def current(self) -> int:
        """The handle of the stream that the calling thread's work goes to."""
        return self._cuda.current_stream(self.device).cuda_stream

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """See ``Machine``."""
        stream = self._cuda.current_stream(self.device)
        for tensor in tensors:
            tensor.record_stream(stream)

    def active(self) -> AbstractContextManager[Any]:
        """See ``Machine``."""
        return self._cuda.stream(self.whole.stream)

    def enter(self, stream: CudaStream, sms: int) -> None:
        """From now on the calling thread's work goes to a stream that has so many SMs."""
        self._cuda.set_device(self.device)
        self._cuda.set_stream(stream.stream)
        self._thread.sms = sms

    def divisions(self) -> list[SmDivision]:
        """See ``Machine``. The last has both on all SMs, and is the only one where the driver divides none, which a
        warning says once."""
        if self._divisions is None:
            shared = SmDivision(self.num_sms, self.num_sms, divided=False)
            try:
                if self._partitioner is None:
                    self._partitioner = Partitioner(self.device)
                self._divisions = [*self._partitioner.divisions(), shared]
            except PartitionError as error:
                self._share(error)
                self._divisions = [shared]
        return self._divisions

    def lanes(self, division: SmDivision) -> tuple[Worker, Worker]:
        """See ``Machine``. Where the driver has the SMs counted but makes no streams on them, both lanes have all SMs,
        and a warning says so."""
        if division not in self._pairs:
            self._pairs[division] = self._pair(division)
        decode, prefill = self._pairs[division]
        return CudaLane("decode", *decode, self), CudaLane("prefill", *prefill, self)

    def inputs(self, layers: Sequence[AttentionLayer], page_size: int) -> StepInputs:
        """See ``Machine``."""
        from chunkc.kernels.triton_attention import device_of  # imports Triton

        return DeviceInputs(
            layers,
            page_size,
            target=self.device,
            tiles_for=device_of(self.device),
            model=lambda itemsize: device_models.cuda(self._properties, itemsize=itemsize),
            units=lambda: self.units,
        )

    def _pair(self, division: SmDivision) -> tuple[tuple[CudaStream, int], tuple[CudaStream, int]]:
        """Streams for decode and prefill, each with how many SMs it has."""
        if division.divided:
            try:
                decode, prefill = self._partitioner.streams(division)
                return (
                    (CudaStream(decode, self._cuda), division.decode),
                    (CudaStream(prefill, self._cuda), division.prefill),
                )
            except PartitionError as error:
                self._share(error)
        # A block of the decodes, which are short, is taken before one of the prefill where both wait for room.
        decode, prefill = self._cuda.Stream(self.device, priority=-1), self._cuda.Stream(self.device)
        return (CudaStream(decode, self._cuda), self.num_sms), (CudaStream(prefill, self._cuda), self.num_sms)

    def _share(self, error: PartitionError) -> None:
        warnings.warn(
            f"{error}: decodes and prefill have streams of their own, but share all SMs of {self.device}",
            RuntimeWarning,
            stacklevel=3,
        )
