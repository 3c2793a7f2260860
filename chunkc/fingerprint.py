"""A key that stands for all of a model that capture and passes look at, so that equal models are prepared once.

Not part of it are the values of parameters, which nothing looks at. What cannot be told is not guessed: a model with
code of its own (not transformers' or torch's), hooks, or members of unknown kind has no fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import torch
from torch import nn

from chunkc.artifacts import key_of
from chunkc.live_code import CannotTell, code_of
from chunkc.source_files import own_sources

#: packages whose code is told by their version
_KNOWN = ("torch", "transformers")
#: members of every module that its class or ``_describe`` covers, or that inference does not look at
_COVERED = {"training", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "generation_config"}
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def fingerprint(model: nn.Module) -> str:
    """Key of a model in evaluation mode, its code as it stands in this process, and chunkc's.

    Raises:
        CannotTell: it has none; the message says why.
    """
    versions = [f"{name} {metadata.version(name)}" for name in _KNOWN]
    return key_of(*versions, own_sources(), *code_of(model), *_describe(model))


def _describe(model: nn.Module) -> Iterator[str]:
    seen: dict[int, str] = {}
    if any(getattr(torch.nn.modules.module, hooks, None) for hooks in _GLOBAL_HOOKS):
        raise CannotTell("there are hooks on all modules")
    for path, module in model.named_modules(remove_duplicate=False):
        yield f"{path}: {_class_of(module)}"
        if path and id(module) in seen:
            yield f"{path} is {seen[id(module)]}"
            continue
        seen[id(module)] = path
        if any(getattr(module, hooks, None) for hooks in _HOOKS):
            raise CannotTell(f"{path or 'the model'} has hooks")
        for name, member in sorted(vars(module).items()):
            if name not in _COVERED and not name.endswith("_hooks") and not name.startswith("_forward_hooks"):
                yield f"{path}.{name} = {_member(f'{path}.{name}', member)}"
    yield from _tensors(model)


def _class_of(module: nn.Module) -> str:
    if not _is_found(type(module).__module__, type(module).__qualname__, type(module)):
        raise CannotTell(f"{type(module).__qualname__} is not the class of that name in {type(module).__module__}")
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _tensors(model: nn.Module) -> Iterator[str]:
    owners: dict[tuple[int, int], str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        owner = owners.setdefault((tensor.data_ptr(), tensor.numel()), name)
        yield f"{name}: {type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} as {owner}"
        if not isinstance(tensor, nn.Parameter):  # masks and rotary tables: passes look at what they hold
            yield hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def _member(path: str, member: Any) -> str:
    if member is None or isinstance(member, (bool, int, float, str, torch.dtype, torch.device)):
        return repr(member)
    if isinstance(member, (list, tuple)):
        return f"{type(member).__name__}[{', '.join(_member(path, item) for item in member)}]"
    if isinstance(member, (set, frozenset)):
        return f"set[{', '.join(sorted(_member(path, item) for item in member))}]"
    if isinstance(member, dict):
        return f"dict[{', '.join(f'{key!r}: {_member(path, item)}' for key, item in sorted(member.items(), key=str))}]"
    if isinstance(member, types.MethodType):
        raise CannotTell(f"{path} is bound to an object")
    if isinstance(member, functools.partial):
        return f"partial {_member(path, member.func)} {_member(path, member.args)} {_member(path, member.keywords)}"
    if hasattr(member, "to_dict") and type(member).__module__.startswith("transformers."):
        return f"{type(member).__qualname__} {json.dumps(member.to_dict(), sort_keys=True, default=str)}"
    module = getattr(member, "__module__", None) or ""
    name = getattr(member, "__qualname__", None)
    if name is not None and module.partition(".")[0] in _KNOWN and _is_found(module, name, member):
        return f"{module}.{name}"
    raise CannotTell(f"{path} is a {type(member).__name__}")


def _is_found(module: str, name: str, member: Any) -> bool:
    """Whether ``module.name`` is ``member``, so that its name tells what it does."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is member or getattr(found, "__func__", found) is getattr(member, "__func__", member)
