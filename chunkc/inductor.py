"""One graph -> one shared library, by Inductor. ``chunkc.graph_library`` calls it."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

from chunkc import kernels
from chunkc.errors import PassError
from chunkc.graph_library import OPTIONS
from chunkc.passes.fx_tools import fake_mode_of, placeholders, value
from chunkc.passes.size_guards import failing_guards

#: the headers that every graph's code includes
_HEADERS = Path(kernels.__file__).parent / "graph_headers.h"


def compile_to_libraries(graph_modules: Sequence[fx.GraphModule]) -> list[Path]:
    """Compile graphs; sizes stay as dynamic as the graphs say they are. Code is built for all of them side by side.

    Args:
        graph_modules: each of placeholders and calls only, with fake values; returns a tuple of tensors, none of them
            an alias of an input.

    Returns:
        their libraries, in Inductor's own folder: copy or load them at once.

    Raises:
        PassError: compilation assumed something of the sizes that the graph does not say.
    """
    with ThreadPoolExecutor() as pool:  # of compiler processes
        entries = [_generate(graph_module, pool) for graph_module in graph_modules]
        return [Path(entry().__self__.__file__) for entry in entries]


def _generate(graph_module: fx.GraphModule, pool: Executor) -> Callable[[], Any]:
    """Have Inductor write the code of a graph; returns what waits for its library and gives its entry point."""
    from torch._inductor import config, standalone_compile

    # Inductor looks for the shape environment in this entry only. Without it, it makes a new one in which two
    # sizes that happen to have the same hint become one, and the artifact is silently wrong.
    result = graph_module.graph.output_node().args[0][0]
    result.meta["example_value"] = value(result)
    environment = fake_mode_of(graph_module.graph).shape_env
    examples = [value(node) for node in placeholders(graph_module.graph).values()]
    with (
        torch.no_grad(),
        warnings.catch_warnings(),
        config.patch(OPTIONS),
        _no_trials(),
        _building_in(pool) as builds,
    ):
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own internals
        standalone_compile(graph_module, examples, dynamic_shapes="from_graph")
    assumed = failing_guards(environment)
    if assumed:
        raise PassError(f"compiling the graph specialised its sizes: {'; '.join(assumed)}")
    if len(builds) != 1:
        raise PassError(f"Inductor made {len(builds)} libraries of one graph")
    return builds[0]


def _no_trials() -> contextlib.AbstractContextManager[Any]:
    """Has Inductor believe the CPU about its vector instructions, unless it was told what to believe. It would compile
    three programs to try them, which takes longer than to compile a layer."""
    from torch._inductor import config

    told = config.cpp.vec_isa_ok is not None
    return contextlib.nullcontext() if told else config.patch({"cpp.vec_isa_ok": True})


@functools.cache
def _libraries() -> Any:
    """Inductor's maker of libraries, but that it precompiles all headers of a graph's code. A class of ours: to change
    Inductor's own for a while would be seen, and undone, by the thread that prepares the compiler."""
    from torch._inductor.codecache import CppWrapperCodeCache

    class Libraries(CppWrapperCodeCache):
        @classmethod
        def _get_uncompiled_header(cls, device: str) -> str:
            return str(_HEADERS)

    return Libraries


@contextlib.contextmanager
def _building_in(pool: Executor) -> Iterator[list[Callable[[], Any]]]:
    """Has Inductor's libraries built in the background, and notes what waits for each."""
    from torch._inductor.codecache import CppWrapperCodeCache, PyCodeCache

    builds: list[Callable[[], Any]] = []

    def build(*arguments: Any, **keywords: Any) -> Any:
        builds.append(_libraries().load_pybinding_async(*arguments, submit_fn=pool.submit, **keywords))
        return None  # Inductor's own wrapper would call it; we do not use that

    # what was compiled before in this process would not be loaded again
    PyCodeCache.cache_clear()
    logger = logging.getLogger("torch._inductor.standalone_compile")  # says that it cannot save: the library is ours
    with mock.patch.object(CppWrapperCodeCache, "load_pybinding", build), mock.patch.object(logger, "disabled", True):
        yield builds


def prepare_compiler() -> None:
    """Do ahead, perhaps in another thread, what Inductor's first compilation on a machine does: it takes seconds.

    That is to find the CPU's vector instructions and to precompile headers; both are kept by Inductor. A library of
    nothing is built for it.
    """
    with _no_trials():
        _libraries().load_pybinding_async(
            ["std::vector<AtenTensorHandle>"],
            "void inductor_entry_impl(AtenTensorHandle*, AtenTensorHandle*) {} // at::vec::Vectorized",
            num_outputs=1,
            submit_fn=lambda build: None,  # headers are made before this; the library itself is of no use
        )
