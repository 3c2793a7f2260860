"""Graphs -> shared libraries, by Inductor. ``chunkc.graph_library`` loads them."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import fx

from chunkc.errors import PassError
from chunkc.graph_library import OPTIONS
from chunkc.passes.fx_tools import fake_mode_of, placeholders, value
from chunkc.passes.size_guards import failing_guards

#: graphs in a library: the headers of one take as long to read as the code of four graphs takes to compile
_TOGETHER = 8
#: no line numbers for debuggers and no warnings, which nobody sees: a seventh of a compiler's time
_QUICKER = ("-g0", "-w")


def begin_libraries(
    graph_modules: Sequence[fx.GraphModule], names: Sequence[str], folder: Path
) -> list[Callable[[], Path]]:
    """Have code written for graphs, and begin to compile it; sizes stay as dynamic as the graphs say they are.

    Several graphs share a library. Compilers are processes, which another core can run.

    Args:
        graph_modules: each of placeholders and calls only, with fake values; returns a tuple of tensors, none of them
            an alias of an input.
        names: of their entry points, no two alike; words of C++.
        folder: an empty one, for the libraries.

    Returns:
        for each graph, what waits for its library, and raises the compiler's error where there is one.

    Raises:
        PassError: Inductor assumed something of the sizes that the graph does not say.
    """
    named = list(zip(names, graph_modules, strict=True))
    waits: list[Callable[[], Path]] = []
    with _settings():
        pool = ThreadPoolExecutor(thread_name_prefix="chunkc-compiler")
        try:
            for first in range(0, len(named), _TOGETHER):
                group = named[first : first + _TOGETHER]
                source = together({name: _generate(graph_module, name) for name, graph_module in group})
                build = pool.submit(_build, _builder(source, folder, first))
                waits += [build.result] * len(group)
        finally:
            pool.shutdown(wait=False)
    return waits


def together(sources: Mapping[str, str]) -> str:
    """One source of several, each in a namespace with the name of its entry point.

    Two graphs may have kernels of one name, which Inductor declares as C functions: those know no namespaces, so they
    become functions of their file.
    """
    lines = {name: source.replace('extern "C"', "static").splitlines() for name, source in sources.items()}
    headers = dict.fromkeys(line for source in lines.values() for line in source if line.startswith("#include"))
    pieces = ["\n".join(headers)]
    for name, source in lines.items():
        code = "\n".join(line for line in source if not line.startswith("#include"))
        pieces.append(f"namespace {name} {{\n{code}\n}} // namespace {name}")
    return "\n\n".join(pieces) + "\n"


def _generate(graph_module: fx.GraphModule, name: str) -> str:
    """The code of a graph, with a Python module ``name`` that has a function of that name, its entry point."""
    from torch._inductor import standalone_compile

    # Inductor looks for the shape environment in this entry only. Without it, it makes a new one in which two
    # sizes that happen to have the same hint become one, and the artifact is silently wrong.
    result = graph_module.graph.output_node().args[0][0]
    result.meta["example_value"] = value(result)
    environment = fake_mode_of(graph_module.graph).shape_env
    examples = [value(node) for node in placeholders(graph_module.graph).values()]
    with torch.no_grad(), _taking_code(name) as sources:
        standalone_compile(graph_module, examples, dynamic_shapes="from_graph")
    assumed = failing_guards(environment)
    if assumed:
        raise PassError(f"compiling the graph specialised its sizes: {'; '.join(assumed)}")
    if len(sources) != 1:
        raise PassError(f"Inductor made {len(sources)} libraries of one graph")
    return sources[0]


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    from torch._inductor import config

    with config.patch(OPTIONS), _no_trials(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, about its own internals
        yield


@contextlib.contextmanager
def _no_trials() -> Iterator[None]:
    """Has Inductor believe the CPU about its vector instructions, unless it was told what to believe, and the compiler
    about those it knows. Inductor would compile and load programs to try them, which takes longer than to compile a
    layer."""
    from torch._inductor import config
    from torch._inductor.cpu_vec_isa import VecISA

    if config.cpp.vec_isa_ok is not None:
        yield
        return
    with config.patch({"cpp.vec_isa_ok": True}), mock.patch.object(VecISA, "check_build", _compiler_knows):
        yield


def _compiler_knows(instructions: Any, code: str) -> bool:
    """Whether the compiler has vector instructions (a ``VecISA``); in place of whether it compiles ``code``."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    flags = instructions.build_arch_flags().split()
    command = [get_cpp_compiler(), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


@contextlib.contextmanager
def _taking_code(name: str) -> Iterator[list[str]]:
    """Has Inductor hand over the code that it would build, for a Python module ``name``."""
    from torch._inductor.codecache import CppWrapperCodeCache, PyCodeCache

    sources: list[str] = []

    class Sources(CppWrapperCodeCache):
        entry_function = name

        @classmethod
        def load_async(cls, main_code: str, *_: Any, optimized_code: str | None = None, **__: Any) -> None:
            sources.append(main_code + (optimized_code or ""))

    # what was compiled before in this process would not be loaded again
    PyCodeCache.cache_clear()
    logger = logging.getLogger("torch._inductor.standalone_compile")  # says that it cannot save: the library is ours
    with (
        mock.patch.object(CppWrapperCodeCache, "load_pybinding", Sources.load_pybinding_async),
        mock.patch.object(logger, "disabled", True),
    ):
        yield sources


def _builder(source: str, folder: Path, number: int) -> Any:
    """What builds a library as Inductor would, but for its cache, which does not notice damage."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    file = folder / f"graphs{number}.cpp"
    file.write_text(source)
    options = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(), device_type="cpu", include_pytorch=True, shared=True, extra_flags=_QUICKER
    )
    return CppBuilder(file.stem, str(file), options, str(folder))


def _build(builder: Any) -> Path:
    builder.build()
    return Path(builder.get_target_file_path())
