"""Waiting for other work to end."""

from __future__ import annotations

from chunkc.bench import quiet


def test_a_busy_machine_is_waited_for_and_then_told(monkeypatch):
    looks = iter([90.0, 2.0, 50.0, 3.0, 1.0])
    monkeypatch.setattr(quiet.psutil, "cpu_percent", lambda interval: next(looks))
    assert quiet.wait_until_quiet(1000) is None
    assert list(looks) == []
    monkeypatch.setattr(quiet.psutil, "cpu_percent", lambda interval: 90.0)
    assert "90% busy" in quiet.wait_until_quiet(0)
