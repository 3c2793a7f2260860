"""Passes by name: the project's own users' and other packages'.

A pass class is registered by decorator, or offered by a package under the entry point group ``chunkc.passes``
(``my_pass = "my_package.passes:MyPass"``). ``chunkc.compile(..., passes=["my_pass"])`` then finds it by name.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import TypeVar

from chunkc.errors import PassError
from chunkc.passes.base import GraphPass

ENTRY_POINT_GROUP = "chunkc.passes"

_REGISTERED: dict[str, type[GraphPass]] = {}

PassClass = TypeVar("PassClass", bound=type[GraphPass])


def register_pass(pass_class: PassClass) -> PassClass:
    """Class decorator: make a pass known under its ``name``.

    Raises:
        PassError: the class has no name, or another class has it already.
    """
    name = getattr(pass_class, "name", None)
    if not isinstance(name, str) or not name:
        raise PassError(f"{pass_class.__qualname__} has no name")
    known = _REGISTERED.get(name)
    if known is not None and _origin(known) != _origin(pass_class):  # the same origin: its module was reloaded
        raise PassError(f"is registered already, by {_origin(known)}", pass_name=name)
    _REGISTERED[name] = pass_class
    return pass_class


def _origin(pass_class: type[GraphPass]) -> str:
    return f"{pass_class.__module__}.{pass_class.__qualname__}"


def find_pass(name: str) -> GraphPass:
    """An instance, with default options, of the pass registered or offered under ``name``.

    Raises:
        PassError: there is none, it has options without defaults, or the entry point does not load or is no pass.
    """
    if name in _REGISTERED:
        return _with_defaults(_REGISTERED[name])
    offered = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)}
    if name in offered:
        try:
            loaded = offered[name].load()
        except Exception as error:
            raise PassError(f"entry point {offered[name].value} does not load: {error}", pass_name=name) from error
        if not (isinstance(loaded, type) and issubclass(loaded, GraphPass)):
            raise PassError(f"entry point {offered[name].value} is not a GraphPass class", pass_name=name)
        return _with_defaults(loaded)
    known = sorted({*_REGISTERED, *offered}) or ["none"]
    raise PassError(f"no pass of this name is registered or offered; known: {', '.join(known)}", pass_name=name)


def _with_defaults(pass_class: type[GraphPass]) -> GraphPass:
    try:
        return pass_class()
    except TypeError as error:
        raise PassError(
            f"cannot be made without options ({error}); give an instance", pass_name=pass_class.name
        ) from error


def resolve(passes: Sequence[GraphPass | str]) -> list[GraphPass]:
    """Passes given as instances or names, as instances.

    Raises:
        PassError: an unknown name, or something that is neither.
    """
    resolved = []
    for entry in passes:
        if isinstance(entry, str):
            entry = find_pass(entry)
        elif not isinstance(entry, GraphPass):
            raise PassError(f"{entry!r} is neither a GraphPass nor the name of one")
        resolved.append(entry)
    return resolved
