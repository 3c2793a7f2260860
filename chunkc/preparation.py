"""From a model to a callable: by capture, passes and lowering, or from what an earlier start kept on disk."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import fx, nn

from chunkc import artifacts, graph_library
from chunkc.assembly import Preparation
from chunkc.errors import UnsupportedModelError
from chunkc.fingerprint import CannotTell, fingerprint
from chunkc.lower import compile_parts
from chunkc.passes.attributes import attribute
from chunkc.passes.base import GraphPass
from chunkc.passes.fx_tools import output_node, value
from chunkc.passes.made_tensors import ingredients
from chunkc.passes.pipeline import PassPipeline
from chunkc.prepared import Prepared, load_prepared, originals_of, own_tensor, store
from chunkc.program import forget_weights
from chunkc.rewriting import rewrite

#: larger constants are not worth keeping; capturing the model again is
_LARGEST_CONSTANTS = 64 * 2**20


def key_for(model: nn.Module) -> str | None:
    """The key under which a model prepared by the core passes is kept, or None where that cannot be told."""
    try:
        return artifacts.key_of(fingerprint(model), graph_library.environment())
    except CannotTell:
        return None


def from_cache(key: str | None, model: nn.Module) -> Preparation | None:
    """The model as it was kept under ``key``, to be made of its weights; None where the cache lacks a piece."""
    start = time.perf_counter()
    entry = artifacts.find("model", key) if key is not None else None
    found = load_prepared(entry) if entry is not None else None
    if found is None:
        return None
    prepared, functions, constants = found
    originals = originals_of(prepared.program, prepared.made, model, constants)
    return Preparation(prepared, lambda: functions, "the cache", time.perf_counter() - start, originals, prepared.made)


def from_scratch(
    model: nn.Module, *, passes: Sequence[GraphPass | str] | PassPipeline, dump: str | Path | None, mode: str
) -> Preparation:
    """Capture, rewrite and lower a model.

    Raises:
        UnsupportedModelError: see ``rewrite``; also passes whose result cannot be served.
    """
    with _without_collecting():
        return _from_scratch(model, passes=passes, dump=dump, mode=mode)


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Tracing makes objects by the million, most of which stay: looking for garbage among them is a tenth of its time,
    and finds 30 MB in a model of 30 layers."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _from_scratch(
    model: nn.Module, *, passes: Sequence[GraphPass | str] | PassPipeline, dump: str | Path | None, mode: str
) -> Preparation:
    start = time.perf_counter()
    deferred = isinstance(passes, Sequence) and not passes  # passes of users may look at what was made
    readable = dump is not None or not deferred
    rewritten = rewrite(model, passes=passes, dump=dump, deferred=deferred, readable=readable)
    context, graph_module = rewritten.context, rewritten.graph_module
    if not context.facts >= {"paged", "logits_gathered"}:
        raise UnsupportedModelError(
            "the pipeline given does not page attention and gather logits, so its graph cannot be served",
            hint="Use chunkc.rewrite to look at partly rewritten graphs.",
        )
    before_lowering = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    compiled = compile_parts(graph_module, mode)
    prepared = Prepared(
        program=compiled.program,
        functions=compiled.keys,
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
    made = prepared.made if deferred else {}
    names = {part for name in compiled.program.weights for part in ingredients(name, made)}
    originals = {
        name: context.ingredients[name] if name in context.ingredients else attribute(graph_module, name).detach()
        for name in names
    }
    constants = None
    if deferred:
        constants = {name: tensor for name, tensor in originals.items() if own_tensor(model, name) is None}
        forget_weights(before_lowering)
    seconds = time.perf_counter() - start
    return Preparation(
        prepared,
        compiled.functions,
        "the model",
        seconds,
        originals,
        made,
        context.resources,
        before_lowering,
        constants,
    )


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
