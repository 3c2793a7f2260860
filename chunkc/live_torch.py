"""torch as this process runs it, in a digest: what a model's code can reach of it, by name.

Python lets anyone put other functions in the place of torch's. A walk through the namespaces that models use (a fixed
list, whatever else was imported) notes what stands under each name: of Python functions the code, of builtin ones the
name, of classes their members, of values that are plain their text. Equal digests mean equal functions; a function
that comes neither from torch's files nor from Python's has none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import json.decoder
import json.scanner
import math
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch._jit_internal
import torch.functional
import torch.nn.attention
import torch.overrides
import torch.utils.checkpoint

from chunkc.clean_process import NotClean
from chunkc.code_digest import digest
from chunkc.foreign_code import is_own

_TORCH = f"{torch.__path__[0]}/"
_WRAPS = f"{_TORCH}_compile.py"
#: of Python's own modules, those that decide on what is read and imported, or that models compute with
_PYTHONS = (math, json, json.decoder, json.scanner, importlib, importlib.util)
#: what is under these names comes and goes, or says nothing of what runs
_PASSED_OVER = {
    *("__annotations__", "__builtins__", "__cached__", "__doc__", "__file__", "__firstlineno__", "__loader__"),
    *("__path__", "__spec__", "__static_attributes__", "__warningregistry__", "__annotations_cache__"),
    *("__slotnames__", "next_id"),  # a copied class's slots, a counter
}
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_PLAIN_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_BUILTIN = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
#: modules of what is written in type hints; some of it can be called
_HINTS = ("typing", "typing_extensions", "types")


def torch_digest() -> str:
    """The digest of this process's torch.

    Raises:
        NotClean: it runs code that is neither torch's nor Python's.
    """
    walk = _Walk()
    for name, members in _namespaces():
        walk.members(name, members)
    walk.classes()
    _check_operators()
    return walk.hexdigest()


def _namespaces() -> Iterator[tuple[str, Mapping[str, Any]]]:
    names = [name for name in sorted(sys.modules) if name.startswith("torch.nn.modules.")]
    modules = [
        *(torch, torch._tensor, torch._jit_internal, torch._ops, torch.functional, torch.overrides, torch._VF),
        *(torch.nn, torch.nn.modules, torch.nn.functional, torch.nn.init, torch.nn.parameter, torch.nn.attention),
        *(torch.special, torch.fft, torch.linalg, torch.utils.checkpoint, torch._C._nn, torch._C._special),
        *(torch._C._fft, torch._C._linalg, torch.amp.autocast_mode, torch.autograd.grad_mode),
        *_PYTHONS,
        *(sys.modules[name] for name in names),
    ]
    for module in modules:
        if sys.modules.get(module.__name__, module) is not module:
            raise NotClean(f"{module.__name__} is another module")
        yield module.__name__, vars(module)
    for kind in (torch.Tensor, torch._C.TensorBase, torch.nn.Parameter, type(torch._C._VariableFunctions)):
        yield kind.__qualname__, vars(kind)


def _check_operators() -> None:
    """What has been used of ``torch.ops.aten`` are operators by the names they have there."""
    aten = torch.ops.aten
    if type(aten) is not torch._ops._OpNamespace:
        raise NotClean("torch.ops.aten is no namespace of operators")
    for name, packet in list(vars(aten).items()):
        if not callable(packet):  # the namespace's own
            continue
        if type(packet) is not torch._ops.OpOverloadPacket or packet._qualified_op_name != f"aten::{name}":
            raise NotClean(f"torch.ops.aten.{name} is another operator")


class _Walk:
    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._met: dict[int, Any] = {}  # functions and classes by their id, which is theirs as long as they are held
        self._classes: list[type] = []

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def members(self, where: str, members: Mapping[str, Any]) -> None:
        """Note what is in a namespace."""
        for name in sorted(members):
            if name not in _PASSED_OVER:
                self._note(f"{where}.{name}", members[name])

    def classes(self) -> None:
        """Note the members of torch's classes that were met, and of those met meanwhile."""
        for kind in self._classes:  # grows
            bases = ", ".join(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
            self._say(f"{kind.__module__}.{kind.__qualname__}({bases})")
            self.members(f"{kind.__module__}.{kind.__qualname__}", vars(kind))

    def _say(self, text: str) -> None:
        self._hash.update(text.encode("utf-8", "surrogatepass") + b"\n")

    def _is_met(self, found: Any) -> bool:
        met = id(found) in self._met
        self._met[id(found)] = found
        return met

    def _note(self, where: str, found: Any) -> None:
        if isinstance(found, types.FunctionType):
            self._note_function(where, found)
        elif isinstance(found, _BUILTIN) or type(found).__name__ in ("instancemethod", "nb_func", "nb_method"):
            self._say(f"{where} {type(found).__name__} {getattr(found, '__qualname__', found.__name__)}")
        elif isinstance(found, (staticmethod, classmethod, types.MethodType)):
            self._note(f"{where} {type(found).__name__}", found.__func__)
        elif isinstance(found, property):
            for part in (found.fget, found.fset, found.fdel):
                self._note(f"{where} property", part)
        elif isinstance(found, functools.partial):
            self._note(f"{where} partial", (found.func, *found.args, *sorted(found.keywords.items())))
        elif isinstance(found, functools._lru_cache_wrapper):
            self._note(f"{where} cached", found.__wrapped__)
        elif isinstance(found, functools.cached_property):
            self._note(f"{where} cached", found.func)
        elif isinstance(found, types.GenericAlias):
            self._say(f"{where} {found!r}")
        elif isinstance(found, type):
            self._note_class(where, found)
        elif isinstance(found, types.ModuleType):
            self._note_module(where, found)
        elif isinstance(found, tuple) and type(found) is tuple:
            self._say(f"{where} tuple {len(found)}")
            for part in found:
                self._note(where, part)
        elif isinstance(found, _PLAIN_TORCH) or type(found) in _PLAIN:
            self._say(f"{where} {found!r}")
        else:
            self._note_object(where, found)

    def _note_function(self, where: str, found: types.FunctionType) -> None:
        if found.__code__.co_filename == _WRAPS:  # torch._dynamo, when it is imported, has others called around it
            found = getattr(found, "__wrapped__", found)
        if not is_own(found):
            raise NotClean(f"{where} is code of {found.__code__.co_filename}")
        self._say(f"{where} {found.__module__}.{found.__qualname__} {_code(found.__code__)}")
        if self._is_met(found):
            return
        for default in (*(found.__defaults__ or ()), *sorted((found.__kwdefaults__ or {}).items())):
            self._note(f"{where} default", default)
        for cell in found.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if callable(held):  # what is no code may be a counter
                self._note(f"{where} closure", held)

    def _note_class(self, where: str, found: type) -> None:
        package = found.__module__.partition(".")[0]
        if package not in ("torch", "typing_extensions", "pybind11_builtins") and not _is_python(package):
            raise NotClean(f"{where} is a class of {found.__module__}")
        self._say(f"{where} class {found.__module__}.{found.__qualname__}")
        if package == "torch" and not self._is_met(found):
            self._classes.append(found)

    def _note_module(self, where: str, found: types.ModuleType) -> None:
        if sys.modules.get(found.__name__, found) is not found:
            raise NotClean(f"{where} is another module than {found.__name__}")
        if found.__name__ != where:  # what torch imports of its own while it is used stands where its name says
            self._say(f"{where} module {found.__name__}")

    def _note_object(self, where: str, found: Any) -> None:
        kind = type(found)
        if kind.__module__ in _HINTS or kind in (torch._ops.OpOverloadPacket, torch._ops.OpOverload):
            self._say(f"{where} {kind.__qualname__} {found}")
            return
        if callable(found):
            raise NotClean(f"{where} is a {kind.__module__}.{kind.__qualname__}")
        self._note_class(where, kind)


@functools.cache
def _code(code: types.CodeType) -> str:
    return digest(code)


@functools.cache
def _is_python(package: str) -> bool:
    return package in sys.stdlib_module_names
