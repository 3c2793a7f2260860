"""Rewritten graph -> callable: its parts, each compiled by Inductor once, or run op by op for debugging.

Weights are arguments of the compiled parts, so an artifact holds no copy of them, layers that are alike share one,
and every dynamic size is an argument's. There is one artifact a kind of part for every number of tokens; it has no
guards and cannot recompile.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from chunkc import artifacts, compat, graph_library, inductor
from chunkc.config import MODES
from chunkc.graph_library import GraphFunction
from chunkc.head import take_head
from chunkc.parts import Part, cut, name_of
from chunkc.passes.attributes import attribute
from chunkc.passes.fx_tools import output_node, placeholders
from chunkc.program import LoweredGraph, PartCall, Program, forget_weights
from chunkc.structure import describe


@dataclass
class CompileCounter:
    """Counts how often a graph was compiled in this process; serving must leave it alone."""

    graphs: int = 0


compile_counter = CompileCounter()


@dataclass(frozen=True)
class Compiled:
    """A graph without its weights.

    Attributes:
        program: its parts.
        functions: waits for the compiler, and gives them, one a kind; once. It raises what went wrong.
        keys: cache keys of the functions; none in mode "eager".
    """

    program: Program
    functions: Callable[[], Sequence[GraphFunction]]
    keys: tuple[str, ...] = ()


def lower(graph_module: fx.GraphModule, mode: str, resources: Sequence[Any] = ()) -> LoweredGraph:
    """Compile the graph. Its weights are taken out of it.

    Args:
        graph_module, mode: see ``compile_parts``; the graph's tensors are real.
        resources: what the passes want kept (``PassContext.resources``).

    Raises:
        ValueError, PassError: see ``compile_parts``.
    """
    compiled = compile_parts(graph_module, mode)
    weights = {name: attribute(graph_module, name).detach() for name in compiled.program.weights}
    forget_weights(graph_module)
    return LoweredGraph(compiled.program, compiled.functions(), weights, resources)


def compile_parts(graph_module: fx.GraphModule, mode: str) -> Compiled:
    """Compile the graph but for its weights, which may be fake.

    Args:
        graph_module: after all passes; every node has a fake value.
        mode: "compiled" (Inductor) or "eager" (op by op, for debugging).

    Raises:
        ValueError: unknown mode.
        PassError: compilation assumed something of the sizes that the graph does not say.
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}; there are: {', '.join(MODES)}")
    head = take_head(graph_module)
    parts = cut(graph_module)
    kinds = _kinds(parts)
    calls = tuple(PartCall(kind, part.inputs, part.outputs) for kind, part in zip(kinds, parts, strict=True))
    inputs, result = tuple(placeholders(graph_module.graph)), name_of(output_node(graph_module.graph))
    program = Program(inputs, calls, result, head)
    first = [parts[kinds.index(kind)].graph_module for kind in range(program.num_kinds)]
    if mode != "compiled":
        return Compiled(program, lambda: first)
    # all keys before the first compilation, which narrows what the shape environment says of sizes
    keys = tuple(artifacts.key_of(describe(part.graph), graph_library.environment()) for part in first)
    return Compiled(program, _begin(first, keys), keys)


def _kinds(parts: Sequence[Part]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(describe(part.graph_module.graph), len(numbers)) for part in parts]


def _begin(graph_modules: Sequence[fx.GraphModule], keys: Sequence[str]) -> Callable[[], list[GraphFunction]]:
    """Begin to compile every graph that the cache lacks; returns what waits for the functions of all."""
    found = [graph_library.find(key) for key in keys]
    missing = [number for number, function in enumerate(found) if function is None]
    functions = {number: function for number, function in enumerate(found) if function is not None}
    if not missing:
        return lambda: list(functions.values())
    names = [graph_library.entry_name(keys[number]) for number in missing]
    folder = tempfile.TemporaryDirectory(prefix="chunkc-graphs-")
    try:
        with compat.one_graph_for_every_size():
            waits = inductor.begin_libraries([graph_modules[number] for number in missing], names, Path(folder.name))
    except BaseException:
        folder.cleanup()
        raise

    def finish() -> list[GraphFunction]:
        kept: dict[Path, artifacts.Entry] = {}
        with folder:  # a library that the cache could not keep is loaded by then
            libraries = [wait() for wait in waits]
            compile_counter.graphs += len(missing)
            for number, name, library in zip(missing, names, libraries, strict=True):
                facts = {"nodes": len(graph_modules[number].graph.nodes)}
                files = {graph_library.LIBRARY: library}
                entry = artifacts.store("graph", keys[number], files, facts, twin=kept.get(library))
                if entry is not None:
                    kept.setdefault(library, entry)
                place = library if entry is None else entry.folder / graph_library.LIBRARY
                functions[number] = graph_library.load(place, name)
        return [functions[number] for number in range(len(keys))]

    return finish
