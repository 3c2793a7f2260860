"""Threads that cannot run are not used, and settings that slow steps down are said."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch

import chunkc.runtime.thread_limits as thread_limits
from chunkc.runtime.machine import Cores
from chunkc.runtime.thread_limits import settle_threads, warn_of_binding


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def settled(monkeypatch, *, cores: int, threads: int, quota: float | None = None, **environment: str):
    """(threads afterwards, what was said)."""
    monkeypatch.setattr(thread_limits, "available_cores", lambda: list(range(cores)))
    monkeypatch.setattr(thread_limits, "cpu_quota", lambda: quota)
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        settle_threads(environment)
    assert all(one.category is RuntimeWarning for one in said)
    return torch.get_num_threads(), [str(one.message) for one in said]


def test_nothing_is_said_where_all_is_well(monkeypatch):
    for cores, threads, quota in ((2, 2, None), (4, 2, None), (4, 4, 4.0), (4, 2, 2.5), (1, 1, 0.5)):
        assert settled(monkeypatch, cores=cores, threads=threads, quota=quota) == (threads, [])
    assert settled(monkeypatch, cores=2, threads=2, OMP_WAIT_POLICY="active", OMP_DYNAMIC="false") == (2, [])


@pytest.mark.parametrize(("quota", "expected"), [(2.0, 2), (2.9, 2), (1.0, 1), (0.3, 1)])
def test_a_quota_lowers_the_default(monkeypatch, quota, expected):
    threads, (said,) = settled(monkeypatch, cores=4, threads=4, quota=quota)
    assert threads == expected
    assert f"its control group allows {quota:g}" in said and f"it has {expected} from now on" in said


def test_what_somebody_asked_for_stays_and_is_said(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        threads, (said,) = settled(monkeypatch, cores=4, threads=4, quota=2.0, **{name: "4"})
        assert threads == 4 and "torch.set_num_threads(2)" in said
    threads, (said,) = settled(monkeypatch, cores=2, threads=3)
    assert threads == 3 and "this process may use 2)" in said
    _, (said,) = settled(monkeypatch, cores=1, threads=2, OMP_PROC_BIND="true")
    assert "OMP_PROC_BIND may have bound it there: unset it" in said


@pytest.mark.parametrize(
    ("name", "text"),
    [("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0"), ("OMP_THREAD_LIMIT", "1"), ("OMP_DYNAMIC", "TRUE")],
)
def test_settings_that_slow_steps_down(monkeypatch, name, text):
    _, (said,) = settled(monkeypatch, cores=2, threads=2, **{name: text})
    assert name in said
    assert settled(monkeypatch, cores=2, threads=1, **{name: text}) == (1, [])  # no team, no trouble


@pytest.mark.parametrize(
    ("name", "text"), [("OMP_PROC_BIND", "close"), ("OMP_PLACES", "cores"), ("GOMP_CPU_AFFINITY", "0-1")]
)
def test_binding_is_said_where_lanes_have_cores_of_their_own(name, text, monkeypatch, two_cores):
    with pytest.warns(RuntimeWarning, match=f"{name} has OpenMP bind"):
        warn_of_binding({name: text})
    monkeypatch.setenv(name, text)
    machine = Cores()
    with pytest.warns(RuntimeWarning, match=name):
        for lane in machine.lanes(machine.divisions()[0]):
            lane.close()


def test_no_binding_no_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_binding({"OMP_PROC_BIND": "false"})
        warn_of_binding({})
