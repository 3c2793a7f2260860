"""Whether somebody else's code stands in the modules of Python and of torch that this process has imported.

What reads a configuration, imports a module or makes a class decides on a model as much as its own code does. Own code
in the wrong place is not seen here: for what matters most ``live_torch`` notes what stands under each name.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import typing_extensions

from chunkc.clean_process import NotClean

_TORCH = f"{torch.__path__[0]}/"
_PYTHON = (f"{sysconfig.get_path('stdlib')}/", "<frozen ")
#: of torch's modules those that models may call and ``live_torch`` does not look at
_OF_TORCH = ("torch.compiler", "torch.jit", "torch.amp", "torch.autograd", "torch.backends", "torch.utils._pytree")
#: what Python has people put functions of theirs under; models' code has no part in it
_PLACES_FOR_OTHERS = {
    *("excepthook", "unraisablehook", "displayhook", "breakpointhook", "__interactivehook__"),
    *("showwarning", "formatwarning"),
}
_MOCKS = "unittest.mock"  # Python's own, but who puts one elsewhere means something by it
_OTHERS = ("/site-packages/", "/dist-packages/")  # they may lie in Python's own folder


def check_modules() -> None:
    """Check every function of Python's modules and of some of torch's, and that nothing is called when functions are.

    Raises:
        NotClean: some function comes from elsewhere, or calls are watched by somebody who may act on them.
    """
    watched = (sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace())
    if any(watch is not None for watch in watched) or any(_tools()):
        raise NotClean("calls of functions are watched")
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        python = package in sys.stdlib_module_names and package != "distutils"  # setuptools has one of its own
        if python or name in _OF_TORCH:
            if not isinstance(module, types.ModuleType) and package != "typing":  # which has classes for modules
                raise NotClean(f"{name} is no module")
            _check_members(name, vars(module), callables=python and name != _MOCKS)


def is_own(function: types.FunctionType) -> bool:
    """Whether a function's code is torch's or Python's; what that calls for others is in its closure."""
    file = function.__code__.co_filename
    if file.startswith(_TORCH) or file == typing_extensions.__file__:
        return True
    if file.startswith(_PYTHON):
        return not any(others in file for others in _OTHERS)
    # made at run time, as dataclasses and named tuples do, in the namespace of the module that has it made
    made_in = str(function.__globals__.get("__name__", ""))
    package = made_in.partition(".")[0]
    known = package == "torch" or package in sys.stdlib_module_names or made_in.startswith("namedtuple_")
    return file.startswith("<") and known


def _tools() -> Iterator[bool]:
    """For each place of Python's own monitoring, from Python 3.12 on, whether somebody has it."""
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None:
        yield from (monitoring.get_tool(number) is not None for number in range(6))


def _check_members(where: str, members: Mapping[str, Any], *, callables: bool) -> None:
    for name, member in list(members.items()):
        if name in _PLACES_FOR_OTHERS:
            continue
        kind = type(member)  # some of torch's objects do not like to be asked for anything, even their class
        if kind in (staticmethod, classmethod, types.MethodType):
            member, kind = member.__func__, type(member.__func__)
        if kind is types.FunctionType:
            if not is_own(member):
                raise NotClean(f"{where}.{name} is code of {member.__code__.co_filename}")
        elif issubclass(kind, type):
            if member.__module__ == where:  # once, where it is at home
                _check_members(f"{where}.{name}", vars(member), callables=False)
        elif kind is property:
            _check_members(f"{where}.{name}", {"get": member.fget, "set": member.fset}, callables=False)
        elif kind is functools.partial:
            _check_members(f"{where}.{name}", {"func": member.func}, callables=callables)
        elif callables and callable(member) and _is_foreign(kind):
            raise NotClean(f"{where}.{name} is a {kind.__module__}.{kind.__qualname__}")


def _is_foreign(kind: type) -> bool:
    package = kind.__module__.partition(".")[0]
    return package not in sys.stdlib_module_names or kind.__module__ == _MOCKS
