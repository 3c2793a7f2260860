"""The modes of an engine: the policy that chooses one, and an executor for each, made when it is first needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chunkc.runtime.contention import Contention, candidates, measure
from chunkc.runtime.executors import Executor, Inline, Result, Streams
from chunkc.runtime.machine import CORES, Division, Machine
from chunkc.runtime.multiplex import Fixed, Mode, MultiplexPolicy, StepView, check_mode, division_of
from chunkc.runtime.spans import SpanLog

if TYPE_CHECKING:
    from chunkc.runtime.runner import ModelRunner


class Modes:
    """Which executor computes the next step.

    Args:
        runner: the model.
        policy: chooses the mode of each step.
        decode_cores: cores for the decodes where prefill runs beside them (SMs on a GPU; at least as many); None as
            measured, else the fewest.
        spans, clock: for what runs where and when.
        machine: what the model runs on.

    Attributes:
        machine: as given.
        policy, decode_cores: as given; may be set between steps.
        contention: what ``measure`` measured; None before.
    """

    def __init__(
        self,
        runner: ModelRunner,
        policy: MultiplexPolicy,
        decode_cores: int | None,
        spans: SpanLog,
        clock: Callable[[], float],
        machine: Machine = CORES,
    ) -> None:
        self.machine = machine
        self.policy, self.decode_cores = policy, decode_cores
        self.contention: Contention | None = None
        self._runner, self._spans, self._clock = runner, spans, clock
        self._inline = Inline(runner, spans, clock, machine)
        self._streams: Streams | None = None
        self._divisions: list[Division] | None = None
        self._current: Executor = self._inline

    def __str__(self) -> str:
        mode = (
            f"multiplex {self.policy.chosen!r}" if isinstance(self.policy, Fixed) else f"multiplex by {self.policy!r}"
        )
        cores = "" if self._streams is None else f"; cores for decode + prefill: {self._streams.division}"
        measured = "contention of decode and prefill: not measured, engine.calibrate() does"
        return f"{mode}{cores}\n{measured if self.contention is None else self.contention}"

    def measure(self) -> Contention:
        """Measures what decode and prefill cost each other, and goes by it from now on.

        Raises:
            ValueError: there is but one core.
        """
        self._drop_streams()  # its threads would be in the way
        self.contention = measure(self._runner, candidates(self.divisions()), self._clock, self.machine)
        return self.contention

    def divisions(self) -> list[Division]:
        """How the machine can be divided; as it was when this was first asked.

        Raises:
            ValueError: it cannot be, as there is but one core.
        """
        if self._divisions is None:
            self._divisions = self.machine.divisions()
        return self._divisions

    def division(self, decode_cores: int | None) -> Division:
        """The division with so many cores for the decodes; for None as measured, else the one with the fewest.

        Raises:
            ValueError: there is but one core, or none would be left for the prefill.
        """
        if decode_cores is None and self.contention is not None:
            return self.contention.best.division
        return division_of(decode_cores, self.divisions())

    def choose(self, view: StepView) -> Mode:
        """The mode of the next step.

        Raises:
            ValueError: the policy named no mode.
        """
        return check_mode(self.policy.mode(view))

    def executor(self, mode: Mode) -> Executor:
        """What computes a step in this mode. A prefill that another executor has under way is stopped between two
        parts, so that this one can go on with it."""
        wanted: Executor = self._streams_executor() if mode == "streams" else self._inline
        if wanted is not self._current:
            self._current.leave()
            self._current = wanted
        return wanted

    def compute(self, call: Callable[[], Result]) -> Result:
        """Calls where the last step's batch ran, or would have."""
        return self._current.compute(call)

    def settle(self) -> None:
        """Returns when no part of any prefill is running."""
        self._current.settle()

    def _streams_executor(self) -> Streams:
        division = self.division(self.decode_cores)
        if self._streams is None or self._streams.division != division:
            self._drop_streams()
            self._streams = Streams(self._runner, division, self._spans, self._clock, self.machine)
        return self._streams

    def _drop_streams(self) -> None:
        if self._streams is not None:
            self._streams.leave()
            self._streams = None
            self._current = self._inline
