"""What the model runs on, as the runtime sees it: one stream that has all of it, and pairs of lanes that share it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from chunkc.passes.attention_layer import AttentionLayer
from chunkc.runtime.fences import Immediate, Stream
from chunkc.runtime.lanes import Lane, Worker
from chunkc.runtime.step_inputs import HostInputs, StepInputs
from chunkc.runtime.thread_limits import available_cores, warn_of_binding


class Division(Protocol):
    """How a machine is shared by decodes and prefill. ``str()`` says it in a word or two."""

    @property
    def decode_units(self) -> int:
        """Cores, or streaming multiprocessors (SMs), of the decodes."""


@dataclass(frozen=True)
class CoreDivision:
    """Which cores decode and which prefill where both run at the same time; disjoint, at least one each."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.decode or not self.prefill or set(self.decode) & set(self.prefill):
            raise ValueError(f"decode and prefill need disjoint cores, at least one each, not {self}")

    def __str__(self) -> str:
        return f"{len(self.decode)} + {len(self.prefill)}"

    @property
    def decode_units(self) -> int:
        """Cores of the decodes."""
        return len(self.decode)


class Machine(Protocol):
    """Where batches are computed.

    Attributes:
        device: where tensors lie.
        whole: the stream of what the thread that runs the engine does inside ``active``; it has all of the machine.
    """

    device: torch.device
    whole: Stream

    @property
    def current(self) -> int:
        """Tells the stream that the calling thread's work goes to from others."""

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """The calling thread's stream goes on with tensors that were made on another: when they are dropped, their
        memory is not used again before this stream has done what it was given until then."""

    def active(self) -> AbstractContextManager[Any]:
        """In its ``with`` block, what the calling thread computes on the machine is given to ``whole``."""

    def divisions(self) -> list[Any]:
        """Every ``Division`` there can be, the fewest units for the decodes first.

        Raises:
            ValueError: the machine cannot be divided; says why and what to do.
        """

    def lanes(self, division: Any) -> tuple[Worker, Worker]:
        """Lanes for the decodes and the prefill. What they are given runs at the same time."""

    def inputs(self, layers: Sequence[AttentionLayer], page_size: int) -> StepInputs:
        """Makes the inputs of a graph with these attention calls."""


class Cores:
    """The cores of this process: a ``Machine`` on which work has been done when its call returns."""

    current = 0

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.whole: Stream = Immediate()
        self._active = nullcontext()

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """See ``Machine``; nothing is to be done."""

    def active(self) -> AbstractContextManager[Any]:
        """See ``Machine``; nothing is to be done."""
        return self._active

    def divisions(self) -> list[CoreDivision]:
        """Every way to divide this process's cores, as many as torch has threads.

        Raises:
            ValueError: there is one core only, or torch is limited to one thread.
        """
        cores = available_cores()[: torch.get_num_threads()]
        if len(cores) < 2:
            raise ValueError(
                "multiplex='streams', which decode_cores is for, needs two cores or more, one for decodes and one for "
                f"prefill; this process may use {len(available_cores())} and torch {torch.get_num_threads()} threads; "
                "use 'layers' or 'off'"
            )
        return [CoreDivision(tuple(cores[:count]), tuple(cores[count:])) for count in range(1, len(cores))]

    def lanes(self, division: CoreDivision) -> tuple[Worker, Worker]:
        """See ``Machine``. Warns where OpenMP's settings bind threads elsewhere."""
        warn_of_binding()
        return Lane("decode", division.decode), Lane("prefill", division.prefill)

    def inputs(self, layers: Sequence[AttentionLayer], page_size: int) -> StepInputs:
        """See ``Machine``."""
        return HostInputs(layers, page_size)


CORES = Cores()
