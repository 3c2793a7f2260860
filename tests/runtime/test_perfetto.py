"""The trace of a run."""

from __future__ import annotations

import json

import pytest
from toy_runner import ToyRunner

from chunkc.config import EngineConfig, SamplingParams
from chunkc.runtime.engine import Engine
from chunkc.runtime.perfetto import trace_events


@pytest.mark.parametrize("mode, rows", [("off", {"steps", "all cores"}), ("layers", {"steps", "all cores"})])
def test_steps_and_what_ran_in_them(mode, rows):
    engine = Engine(ToyRunner(64, 4), config=EngineConfig(budget=6, multiplex=mode))
    engine.generate([[1, 2, 3], list(range(30))], SamplingParams(max_new_tokens=8, ignore_eos=True))
    metrics = engine.metrics
    events = trace_events(metrics, process=7, name="a run")
    json.dumps(events)
    assert {event["pid"] for event in events} == {7}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == rows
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert len(steps) == metrics.steps
    assert sum(step["args"]["decode tokens"] for step in steps) == metrics.decode_tokens
    inside = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    assert {event["name"].split()[0] for event in inside} == ({"batch"} if mode == "off" else {"batch", "prefill"})
    for event in inside:  # within one step
        assert any(
            step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"] + 1 for step in steps
        )
