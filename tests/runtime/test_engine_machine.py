"""The state machine of ``engine_machine`` with the toy model: in one batch, and with prefill apart from the decodes."""

from __future__ import annotations

import pytest
from engine_machine import EngineMachine
from hypothesis import HealthCheck, settings


def limited(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )


class LayersMachine(EngineMachine):
    """Switches between one batch and turns at any moment."""

    modes = ("off", "layers", "layers")


class StreamsMachine(EngineMachine):
    """Switches between all modes; what a thread of its own does meanwhile is not the same in every run."""

    modes = ("off", "layers", "streams", "streams")


pytestmark = pytest.mark.usefixtures("two_cores")

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = limited(80)
TestLayersMachine = LayersMachine.TestCase
TestLayersMachine.settings = limited(40)
TestStreamsMachine = StreamsMachine.TestCase
TestStreamsMachine.settings = limited(40)
