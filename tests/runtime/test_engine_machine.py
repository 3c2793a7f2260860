"""The state machine of ``engine_machine`` with the toy model."""

from __future__ import annotations

from engine_machine import EngineMachine
from hypothesis import HealthCheck, settings

TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
