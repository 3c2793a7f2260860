"""Whether nobody but Python has had a hand in what this process imports: then code is what its files say.

What was imported before may have been given other functions since, and a hook on imports may do that while a module is
imported. So none of the packages that models come from may be imported yet, and only finders that are known may find.
"""

from __future__ import annotations

import builtins
import importlib._bootstrap
import importlib._bootstrap_external
import sys
import types
import zipimport
from collections.abc import Iterator
from typing import Any

#: packages whose code makes a model of a folder, or takes part in it where they are installed
PACKAGES = ("transformers", "tokenizers", "safetensors", "huggingface_hub", "accelerate", "peft", "kernels")

_bootstrap, _files = importlib._bootstrap, importlib._bootstrap_external
_PYTHONS_FINDERS = (_bootstrap.BuiltinImporter, _bootstrap.FrozenImporter, _files.PathFinder)
#: finders that only say where a file is: by the module of their class (how it begins) and its name
_KNOWN_FINDERS = (
    ("__editable__", "_EditableFinder"),
    ("__editable__", "_EditableNamespaceFinder"),
    ("_distutils_hack", "DistutilsMetaFinder"),
    ("setuptools.extern", "VendorImporter"),
    ("pkg_resources.extern", "VendorImporter"),
    ("six", "_SixMetaPathImporter"),
)


class NotClean(Exception):
    """Why a model may be another than the files of its folder say, in words: its code, or what reads it."""


def check_imports() -> None:
    """Check that modules that are imported from now on are what their files say.

    Raises:
        NotClean: models' code is imported already, or imports do more than to read files.
    """
    for name in PACKAGES:
        if name in sys.modules:
            raise NotClean(f"{name} was imported before")
    for finder in sys.meta_path:
        if finder not in _PYTHONS_FINDERS and not _is_known(finder):
            raise NotClean(f"{finder!r} finds modules")
    for hook in sys.path_hooks:
        if hook is not zipimport.zipimporter and not _finds_files(hook) and not _is_known(_owner(hook)):
            raise NotClean(f"{hook!r} finds modules")
    if type(builtins.__import__) is not types.BuiltinFunctionType or builtins.__import__.__name__ != "__import__":
        raise NotClean("the import statement is another")
    for function in _functions_of_imports():
        if not function.__code__.co_filename.startswith("<frozen importlib"):
            raise NotClean(f"importlib's {function.__qualname__} is another")


def _is_known(finder: Any) -> bool:
    kind = finder if isinstance(finder, type) else type(finder)
    return any(kind.__module__.startswith(module) and kind.__name__ == name for module, name in _KNOWN_FINDERS)


def _owner(hook: Any) -> Any:
    return getattr(hook, "__self__", hook)


def _finds_files(hook: Any) -> bool:
    """Whether it is Python's own hook that finds modules in folders, with Python's own loaders."""
    if not isinstance(hook, types.FunctionType) or hook.__name__ != "path_hook_for_FileFinder":
        return False
    held = [cell.cell_contents for cell in hook.__closure__ or ()]
    return held == [_files.FileFinder, tuple(_files._get_supported_file_loaders())]


def _functions_of_imports() -> Iterator[types.FunctionType]:
    for module in (_bootstrap, _files):
        for value in list(vars(module).values()):
            own = isinstance(value, type) and value.__module__.startswith("_frozen_importlib")
            for member in list(vars(value).values()) if own else [value]:
                function = getattr(member, "__func__", member)
                if isinstance(function, types.FunctionType):
                    yield function
