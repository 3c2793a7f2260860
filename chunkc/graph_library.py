"""The library of a graph -> a function.

Inductor's C++ wrapper makes code with one entry point that takes tensors and returns tensors. We call that entry, in
a library that other graphs may share, by a name made of the graph's key: no guards, no unpacking, no Python between the
operators, and the interpreter lock is free meanwhile. The library alone is what is kept on disk (``chunkc.artifacts``),
so a later start needs neither Inductor nor a compiler.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import chunkc.kernels.fused_linear
import chunkc.kernels.ops  # noqa: F401  (they register the operators that ``environment`` names)
from chunkc import artifacts
from chunkc.kernels.native import instruction_sets

#: takes a graph's inputs in order, returns its outputs
GraphFunction = Callable[..., Sequence[torch.Tensor]]

#: what we ask of Inductor: part of the key of an artifact
OPTIONS: dict[str, Any] = {
    "cpp_wrapper": True,
    "cpp.dynamic_threads": True,  # as many threads as there are when it runs
    "force_disable_caches": True,  # ours holds the result
    "cpp_cache_precompile_headers": False,  # writing them takes three times as long as to read them once, and 190 MB
    # arguments come from us alone and are checked before they get here
    "size_asserts": False,
    "nan_asserts": False,
}

#: file of an artifact
LIBRARY = "graph.so"
_loaded = itertools.count()


def entry_name(key: str) -> str:
    """What the entry point of a graph is called in its library: another library, or part of it, is not taken for it."""
    return f"graph_{key}"


def environment() -> str:
    """What decides, beside a graph, whether a library made from it can serve this process."""
    compiling = sorted(
        f"{name}={text}"
        for name, text in os.environ.items()
        if name.startswith("TORCHINDUCTOR_") and name != "TORCHINDUCTOR_CACHE_DIR"
    )
    names = ("mixed_attention", "packed_linear", "packed_rows", "fused_linear")
    operators = [str(getattr(torch.ops.chunkc, name).default._schema) for name in names]
    facts = [
        torch.__version__,
        str(torch.version.git_version),
        sys.implementation.cache_tag,
        instruction_sets(),
        torch.get_num_threads(),
        OPTIONS,
        *operators,
        *compiling,
    ]
    return "\n".join(map(str, facts))


def load(library: Path, name: str) -> GraphFunction:
    """The function ``name`` of a library that ``begin_libraries`` made, in this process or another.

    Raises:
        ImportError: it is no such library, or of another version of Python, or lacks the function.
    """
    # read by the library when it is loaded
    address = torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(address)
    spec = importlib.util.spec_from_file_location(f"chunkc_graph_{next(_loaded)}.{name}", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    entry = getattr(module, name)
    give = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors
    take = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs

    def run(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        outputs: Sequence[torch.Tensor] = take(entry(give(inputs)))
        return outputs

    return run


def find(key: str) -> GraphFunction | None:
    """The function compiled under a key, or None where the cache does not have it."""
    entry = artifacts.find("graph", key)
    if entry is None:
        return None
    try:
        return load(entry.folder / LIBRARY, entry_name(key))
    except ImportError as error:
        warnings.warn(f"the cache entry {entry.folder} does not load ({error}); it is made again", stacklevel=2)
        artifacts.remove(entry)
        return None
