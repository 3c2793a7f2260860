"""Waiting for other work on the machine to end."""

from __future__ import annotations

import time

import psutil

_QUIET_SHARE = 0.1  # of all cores: more is somebody else's work


def wait_until_quiet(longest: float) -> str | None:
    """Wait, at most ``longest`` seconds, until two looks in a row find the cores free; None, or in words how busy they
    still are."""
    end = time.monotonic() + longest
    quiet = 0
    while True:
        share = psutil.cpu_percent(interval=1.5) / 100
        quiet = quiet + 1 if share < _QUIET_SHARE else 0
        if quiet == 2:
            return None
        if time.monotonic() > end:
            return f"the machine is {share:.0%} busy with other work"
