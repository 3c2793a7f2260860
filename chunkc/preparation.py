"""From a model to a callable: by capture, passes and lowering, or from what an earlier start kept on disk."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx, nn

from chunkc import artifacts, inductor
from chunkc.errors import UnsupportedModelError
from chunkc.fingerprint import CannotTell, fingerprint
from chunkc.kernels import cpu_backend, packed_linear, planner
from chunkc.lower import lower
from chunkc.passes.base import GraphPass
from chunkc.passes.fx_tools import output_node, value
from chunkc.passes.pipeline import PassPipeline
from chunkc.prepared import Prepared, constants_of, load_prepared, store
from chunkc.program import LoweredGraph
from chunkc.rewriting import rewrite

#: larger constants are not worth keeping; capturing the model again is
_LARGEST_CONSTANTS = 64 * 2**20


@dataclass(frozen=True)
class Preparation:
    """A prepared model.

    Attributes:
        prepared: what is known of it.
        graph: the callable.
        source: where it comes from, in words.
        seconds: time it took.
        before_lowering: the graph before compilation, where there is one, to find a faulty module.
        constants: see ``prepared.store``; None where it cannot be kept.
    """

    prepared: Prepared
    graph: LoweredGraph
    source: str
    seconds: float
    before_lowering: fx.GraphModule | None = None
    constants: dict[str, torch.Tensor] | None = None


def key_for(model: nn.Module) -> str | None:
    """The key under which a model prepared by the core passes is kept, or None where that cannot be told."""
    try:
        return artifacts.key_of(fingerprint(model), inductor.environment())
    except CannotTell:
        return None


def from_cache(key: str | None, model: nn.Module) -> Preparation | None:
    """The model as it was kept under ``key``, over its weights; None where the cache does not have all of it."""
    start = time.perf_counter()
    entry = artifacts.find("model", key) if key is not None else None
    found = load_prepared(entry, model) if entry is not None else None
    if found is None:
        return None
    return Preparation(*found, source="the cache", seconds=time.perf_counter() - start)


def from_scratch(
    model: nn.Module, *, passes: Sequence[GraphPass | str] | PassPipeline, dump: str | Path | None, mode: str
) -> Preparation:
    """Capture, rewrite and lower a model.

    Raises:
        UnsupportedModelError: see ``rewrite``; also passes whose result cannot be served.
    """
    start = time.perf_counter()
    _build_ahead(mode)
    rewritten = rewrite(model, passes=passes, dump=dump)
    context, graph_module = rewritten.context, rewritten.graph_module
    if not context.facts >= {"paged", "logits_gathered"}:
        raise UnsupportedModelError(
            "the pipeline given does not page attention and gather logits, so its graph cannot be served",
            hint="Use chunkc.rewrite to look at partly rewritten graphs.",
        )
    before_lowering = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    graph, keys = lower(graph_module, mode, context.resources)
    prepared = Prepared(
        program=graph.program,
        functions=keys,
        made=dict(context.made),
        layers=tuple(context.attention_layers),
        vocab_size=int(value(output_node(before_lowering.graph)).shape[-1]),
        max_positions=context.max_positions,
        proven_length=context.proven_length,
        route=rewritten.route,
        refused=rewritten.refused,
        capture_seconds=rewritten.capture_seconds,
        records=rewritten.records,
    )
    try:
        constants = constants_of(graph.program, context.made, before_lowering, model)
    except AttributeError:  # made of a constant that is gone
        constants = None
    return Preparation(prepared, graph, "the model", time.perf_counter() - start, before_lowering, constants)


def _build_ahead(mode: str) -> None:
    """Have the native libraries built and the compiler made ready, where they are not yet, during capture.

    Who needs one waits for its lock, and meets the error of a build that failed by building it again.
    """

    tasks = [packed_linear.LIBRARY.find_or_build, cpu_backend.LIBRARY.find_or_build, planner.LIBRARY.find_or_build]
    if mode == "compiled":
        tasks.insert(1, inductor.prepare_compiler)

    def build() -> None:
        while tasks:
            with contextlib.suppress(Exception):
                tasks.pop(0)()

    for _ in range(2):  # compilers run in processes of their own
        threading.Thread(target=build, name="chunkc-build", daemon=True).start()


def keep(key: str | None, work: Preparation) -> None:
    """Keep a model that was prepared from scratch, where that can be done."""
    if key is None or work.constants is None:
        return
    if sum(tensor.nbytes for tensor in work.constants.values()) <= _LARGEST_CONSTANTS:
        store(key, work.prepared, work.constants)


def forget(key: str | None) -> None:
    """Delete what is kept under ``key``."""
    entry = artifacts.find("model", key) if key is not None else None
    if entry is not None:
        artifacts.remove(entry)
