"""Passes by name: registered here, or offered by another package."""

from __future__ import annotations

import importlib.metadata
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from torch import fx

from chunkc.errors import PassError
from chunkc.passes import registry
from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.registry import ENTRY_POINT_GROUP, find_pass, register_pass, resolve


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REGISTERED", {})


@dataclass(frozen=True)
class Mine(GraphPass):
    name = "mine"
    strength: int = 3

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        return PassReport(self.strength)


@dataclass(frozen=True)
class NeedsOptions(GraphPass):
    name = "needs_options"
    strength: int

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        return PassReport(self.strength)


def _offer(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Pretend that another package is installed, with these entry points."""
    package = ModuleType("offering_package")
    package.Mine, package.Other, package.function = Mine, NeedsOptions, len
    monkeypatch.setitem(sys.modules, "offering_package", package)
    entries = [importlib.metadata.EntryPoint(name, value, ENTRY_POINT_GROUP) for name, value in values.items()]

    def entry_points(**selection: Any) -> list[importlib.metadata.EntryPoint]:
        assert selection == {"group": "chunkc.passes"}
        return entries

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_a_registered_pass_is_found_by_name() -> None:
    assert register_pass(Mine) is Mine
    assert find_pass("mine") == Mine(strength=3)
    assert resolve(["mine", Mine(strength=5)]) == [Mine(3), Mine(5)]


def test_the_same_class_may_be_registered_again() -> None:
    """Its module may be reloaded."""
    register_pass(Mine)
    again = type("Mine", (Mine,), {"__module__": Mine.__module__, "__qualname__": Mine.__qualname__})
    register_pass(again)
    assert type(find_pass("mine")) is again


@pytest.mark.parametrize("change", [{"__qualname__": "Other"}, {"__module__": "another_package.passes"}])
def test_a_name_clash_is_an_error(change: dict[str, str]) -> None:
    register_pass(Mine)
    names = {"__module__": Mine.__module__, "__qualname__": Mine.__qualname__, **change}
    with pytest.raises(PassError, match=r"'mine'.*registered already, by .*Mine"):
        register_pass(type("Mine", (Mine,), names))
    assert type(find_pass("mine")) is Mine


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_pass_needs_a_name(name: Any) -> None:
    attributes = {} if name is None else {"name": name}
    nameless = type("Nameless", (GraphPass,), {"run": Mine.run, **attributes})
    with pytest.raises(PassError, match="Nameless has no name"):
        register_pass(nameless)


def test_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, mine="offering_package:Mine", unused="missing_package:Nothing")
    assert find_pass("mine") == Mine()  # what is not asked for is not imported


def test_a_registered_pass_comes_before_an_offered_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, mine="missing_package:Nothing")
    register_pass(Mine)
    assert find_pass("mine") == Mine()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("missing_package:Mine", "missing_package:Mine does not load: No module named 'missing_package'"),
        ("offering_package:Nothing", "offering_package:Nothing does not load"),
        ("offering_package:function", "offering_package:function is not a GraphPass class"),
        ("offering_package:Other", "cannot be made without options"),
    ],
)
def test_a_bad_entry_point_is_an_error(monkeypatch: pytest.MonkeyPatch, value: str, reason: str) -> None:
    _offer(monkeypatch, bad=value)
    with pytest.raises(PassError, match=reason) as caught:
        find_pass("bad")
    assert caught.value.pass_name in ("bad", "needs_options")


def test_an_unknown_name_is_an_error_that_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PassError, match=r"'nobody': no pass of this name.*known: none"):
        find_pass("nobody")
    _offer(monkeypatch, offered="offering_package:Mine")
    register_pass(Mine)
    with pytest.raises(PassError, match="known: mine, offered"):
        find_pass("nobody")


def test_options_without_defaults_need_an_instance() -> None:
    register_pass(NeedsOptions)
    with pytest.raises(PassError, match=r"'needs_options': cannot be made without options.*give an instance"):
        find_pass("needs_options")
    assert resolve([NeedsOptions(2)]) == [NeedsOptions(2)]


def test_resolve_takes_nothing_else() -> None:
    with pytest.raises(PassError, match="neither a GraphPass nor the name of one"):
        resolve([Mine])
