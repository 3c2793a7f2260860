"""The code that a model runs in this process: whose files it comes from, and what they hold.

Python lets anyone put other functions in the place of a library's. So it is not the names that count: from the classes
of a model's modules we walk to every function they name, through all of transformers, and each must come from a file
of Python or of an installed package. What those files hold, but for torch's, is part of the fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from chunkc.code_digest import digest

_TRANSFORMERS = str(Path(transformers.__file__).parent) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_PYTHON = str(Path(sysconfig.get_path("stdlib"))) + "/"
#: where packages are installed; files met there count by what they hold, as transformers' do
_INSTALLED = tuple({str(Path(root).parent) + "/" for root in (_TORCH, _TRANSFORMERS)})


class CannotTell(Exception):
    """Why a model has no fingerprint, in words."""


def code_of(model: nn.Module) -> list[str]:
    """Names and hashes of the files whose functions the model may run.

    Raises:
        CannotTell: some function comes from elsewhere.
    """
    files: set[str] = set()
    made: set[str] = set()
    seen: set[int] = set()
    waiting: list[Any] = [base for cls in {type(module) for module in model.modules()} for base in cls.__mro__]
    while waiting:
        found = waiting.pop()
        if id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, type):
            if found.__module__.partition(".")[0] == "transformers" or issubclass(found, nn.Module):
                waiting += vars(found).values()
            continue
        for function in _functions_in(found):
            file = function.__code__.co_filename
            if file.startswith(_TORCH):
                continue
            if file.startswith("<"):  # made at run time, as dataclasses do: told by what it does
                made.add(f"{function.__qualname__} {digest(function.__code__)}")
            elif file.startswith(_INSTALLED):
                files.add(file)
            elif not file.startswith(_PYTHON):
                raise CannotTell(f"{function.__module__}.{function.__qualname__} is code of {file}")
            if file.startswith(_TRANSFORMERS):
                waiting += _named_by(function)
    return [*(f"{file} {_hash(file)}" for file in sorted(files)), *sorted(made)]


def attention_is_known(name: str | None) -> bool:
    """Whether an attention implementation that a configuration names is transformers' own, with its mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for registry in (AttentionInterface(), AttentionMaskInterface()):
        function = registry.get(name) if name in registry else None  # "eager" is each model's own
        for part in _functions_in(function):
            if not part.__code__.co_filename.startswith((_TRANSFORMERS, _TORCH)):
                return False
    return True


def _functions_in(found: Any) -> Iterator[types.FunctionType]:
    """The Python functions behind a member of a class or a module: of a property, a decorator, a partial."""
    if isinstance(found, property):
        parts = (found.fget, found.fset)
        for part in parts:
            yield from _functions_in(part)
    elif isinstance(found, (staticmethod, classmethod, types.MethodType)):
        yield from _functions_in(found.__func__)
    elif isinstance(found, functools.partial):
        yield from _functions_in(found.func)
    elif isinstance(found, types.FunctionType):
        yield found
        if found is not inspect.unwrap(found):
            yield from _functions_in(found.__wrapped__)


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    """What a function names: globals that are functions or classes, and what its closure holds."""
    codes = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        for name in code.co_names:
            named = function.__globals__.get(name)
            if isinstance(named, (types.FunctionType, functools.partial, type)):
                yield named
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        if isinstance(held, (types.FunctionType, types.MethodType, functools.partial, type)):
            yield held


@functools.cache
def _hash(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()
