"""Native libraries are built in the background before anybody needs them, and errors are left to who does."""

from __future__ import annotations

import threading

import pytest

from chunkc import early_builds
from chunkc.errors import ChunkcError


class _Library:
    def __init__(self, built: bool, error: Exception | None = None) -> None:
        self.built, self.error, self.calls = built, error, 0
        self.may_go_on = threading.Event()

    def is_built(self) -> bool:
        return self.built

    def find_or_build(self) -> None:
        self.calls += 1
        assert self.may_go_on.wait(20)
        if self.error is not None:
            raise self.error


def _begin(monkeypatch: pytest.MonkeyPatch, linear: _Library, attention: _Library, plan: _Library) -> list:
    monkeypatch.setattr(early_builds.libraries, "LINEAR", linear)
    monkeypatch.setattr(early_builds.libraries, "ATTENTION", attention)
    monkeypatch.setattr(early_builds.libraries, "PLANNER", plan)
    monkeypatch.setattr(early_builds.libraries, "ONEDNN", _Library(built=True))
    before = set(threading.enumerate())
    early_builds.begin()
    return [thread for thread in threading.enumerate() if thread not in before]


def test_what_is_missing_is_built_meanwhile(monkeypatch):
    broken, fine, there = _Library(False, ChunkcError("no")), _Library(False), _Library(True)
    threads = _begin(monkeypatch, broken, there, fine)  # returns although nothing may be built yet
    assert threads and all(thread.daemon for thread in threads)
    for library in (broken, fine):
        library.may_go_on.set()
    for thread in threads:
        thread.join(20)
    assert (broken.calls, fine.calls, there.calls) == (1, 1, 0)


def test_where_all_is_there_nothing_is_started(monkeypatch):
    assert _begin(monkeypatch, *(_Library(True) for _ in range(3))) == []
