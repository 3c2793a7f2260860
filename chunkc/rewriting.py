"""Model -> ragged, paged graph: capture and passes, without compiling. For researchers, and for ``compile``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx, nn

from chunkc import compat
from chunkc.capture import ROUTES, capture
from chunkc.errors import UnsupportedModelError
from chunkc.passes.base import GraphPass, PassContext
from chunkc.passes.core import core_passes
from chunkc.passes.pipeline import Callback, DumpGraphs, PassPipeline, PassRecord
from chunkc.passes.registry import resolve

#: what configurations call the longest sequence
_LENGTH_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "max_target_positions",
)


@dataclass(frozen=True)
class Rewritten:
    """A model after the passes.

    Attributes:
        graph_module: the rewritten graph; parameters are the model's own tensors, but for those fused.
        context: what the passes found (attention layers, proven length).
        records: one entry per pass.
        route: how the model was captured.
        capture_seconds: time that took.
        refused: why the routes tried before were not taken, in words.
    """

    graph_module: fx.GraphModule
    context: PassContext
    records: tuple[PassRecord, ...]
    route: str
    capture_seconds: float
    refused: tuple[str, ...]


def rewrite(
    model: nn.Module,
    *,
    passes: Sequence[GraphPass | str] | PassPipeline = (),
    stop_after: str | None = None,
    dump: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    deferred: bool = False,
    readable: bool = True,
) -> Rewritten:
    """Capture a model and run the passes on it.

    Args:
        model: a causal LM in evaluation mode; it is not changed.
        passes: passes to run beside the core ones, as instances or registered names; or a whole pipeline in
            their place.
        stop_after: name of the last pass to run.
        dump: folder for the readable graph after every pass and what the pass changed.
        callbacks: called after capture and after every pass.
        deferred: do not make the tensors that the passes want made, only note how (``passes.made_tensors``).
        readable: see ``capture``.

    Raises:
        UnsupportedModelError: no route captures the model, or a pass does not understand it.
        PassError: see ``PassPipeline``.
    """
    pipeline = passes if isinstance(passes, PassPipeline) else PassPipeline([*core_passes(), *resolve(passes)])
    errors: list[UnsupportedModelError] = []
    for route in ROUTES:
        try:
            start = time.perf_counter()
            captured = capture(model, route, readable=readable)
            seconds = time.perf_counter() - start
            config = getattr(model, "config", None)
            context = PassContext(
                config=config,
                route=route,
                max_positions=max_positions_of(config),
                proven_length=captured.longest,
                deferred=deferred,
            )
            watchers = [*callbacks, DumpGraphs(dump)] if dump is not None else list(callbacks)
            with compat.one_graph_for_every_size():
                records = pipeline.run(captured.graph_module, context, stop_after=stop_after, callbacks=watchers)
            refused = tuple(f"{name}: {error}" for name, error in zip(ROUTES, errors, strict=False))
            return Rewritten(captured.graph_module, context, tuple(records), route, seconds, refused)
        except UnsupportedModelError as error:
            errors.append(error)
    raise _most_telling(errors)


def _most_telling(errors: list[UnsupportedModelError]) -> UnsupportedModelError:
    """The error of the first route that got as far as naming an op, else of the last."""
    return next((error for error in errors if error.op is not None), errors[-1])


def max_positions_of(config: Any) -> int | None:
    """Longest sequence that a configuration names, in tokens, or None."""
    if config is None:
        return None
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in _LENGTH_NAMES:
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return None
