"""How prefill and decode share the machine.

    "off"      one batch: decodes and prefill chunks together, in every layer
    "layers"   in turns: the decodes through all layers, then the prompt through a few
    "streams"  at the same time: the decodes on some cores, the prompt on the others

What runs is decided step by step by a ``MultiplexPolicy``. ``Fixed`` always says the same; one that looks at the step
and at what was measured (``Contention``) fits in without a change elsewhere: a prompt that is under way goes on in
whatever mode comes next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from chunkc.config import MULTIPLEX, Multiplex
from chunkc.runtime.machine import Division

if TYPE_CHECKING:
    from chunkc.runtime.contention import Contention

Mode = Multiplex
MODES = MULTIPLEX


@dataclass(frozen=True)
class StepView:
    """What a policy may look at before a step is planned.

    Attributes:
        decodes: running requests that decode.
        prefill_tokens: tokens of admitted prompts that are not in the cache yet.
        waiting: requests without pages.
        apart: whether a prefill is under way apart from the batch.
        contention: what was measured on this machine, None where nothing was.
    """

    decodes: int
    prefill_tokens: int
    waiting: int
    apart: bool
    contention: Contention | None


class MultiplexPolicy(Protocol):
    """Chooses the mode of each step."""

    def mode(self, view: StepView) -> Mode:
        """The mode of the step that is about to be planned."""


@dataclass(frozen=True)
class Fixed:
    """The same mode in every step."""

    chosen: Mode

    def mode(self, view: StepView) -> Mode:
        """What it was made with."""
        return self.chosen


def check_mode(mode: object) -> Mode:
    """The mode, if it is one.

    Raises:
        ValueError: it is none of ``MODES``.
    """
    if mode not in MODES:
        raise ValueError(f"multiplex={mode!r}: must be one of {', '.join(map(repr, MODES))}")
    return mode  # type: ignore[return-value]


def division_of(decode_cores: int | None, every: Sequence[Division]) -> Division:
    """The division, out of ``Machine.divisions``, with so many cores for the decodes, or the next larger number; for
    None, the one with the fewest.

    Raises:
        ValueError: that leaves none for the prefill.
    """
    most = every[-1].decode_units
    if decode_cores is None:
        return every[0]
    if not 1 <= decode_cores <= most:
        raise ValueError(f"decode_cores={decode_cores}: must be 1 to {most}, so that the prefill has a core, too")
    return next(division for division in every if division.decode_units >= decode_cores)
