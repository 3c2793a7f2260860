"""From a folder of weights to a model that can be served, by what an earlier start kept: without a model object.

folder ──kept_start.py, checkpoint.py──> weights of the graph ──check against the kept logits──> runner

Nothing here imports a model's code, or capture and passes. What cannot be served this way is left to ``model_start``.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from chunkc import artifacts, kept_start
from chunkc.assembly import Preparation
from chunkc.check import Verification
from chunkc.checkpoint import Checkpoint
from chunkc.config import EngineConfig
from chunkc.entrance import Entrance
from chunkc.errors import CapacityError, VerificationError
from chunkc.kept_start import FoundStart
from chunkc.kernels import cpu_backend
from chunkc.kernels.cpu_memory import take_back
from chunkc.passes.made_tensors import ingredients
from chunkc.prepared import Prepared, load_prepared
from chunkc.probe import probe_prompts
from chunkc.program import LoweredGraph
from chunkc.recorded_logits import recorded
from chunkc.report import CompileReport
from chunkc.runtime.runner import GraphRunner
from chunkc.serving import Started, load_attention, make_runner
from chunkc.serving import verify as verify_graph
from chunkc.tokenizer_loading import FoundTokenizer, load_tokenizer

#: where what is served comes from, in words
SOURCE = "what an earlier start kept of the folder"
#: two starts would only take turns, and the interpreter's settings are the process's
_one_at_a_time = threading.Lock()


def start(entrance: Entrance, config: EngineConfig, *, tokenizer: Any, verify: str) -> Started | None:
    """Serve a folder as it was served before. See ``chunkc.compile`` for the other arguments.

    Returns:
        None where that is not known, or where something is broken, of which nothing is left then. The start from the
        model tells, and keeps a start anew.

    Raises:
        CapacityError: the cache does not fit.
    """
    began = time.perf_counter()
    found = kept_start.find(entrance.key, entrance.state)
    if found is None:
        return None
    try:
        with _one_at_a_time, _two_threads_at_work():
            started = _start(entrance, found, config, tokenizer, verify, began)
    except CapacityError:
        raise
    except VerificationError as error:
        broken = f"fails the check ({error.reason})"
    except Exception as error:  # whatever it is, the model can still be loaded
        broken = f"cannot be used ({type(error).__name__}: {error})"
    else:
        if started is None or entrance.is_unchanged():
            return started
        return None  # the files changed while they were read
    said = f"what the cache holds of an earlier start of {entrance.folder} {broken}; it is made again"
    warnings.warn(said, RuntimeWarning, stacklevel=3)
    kept_start.forget(entrance.key)
    return None


def _start(
    entrance: Entrance, found: FoundStart, config: EngineConfig, tokenizer: Any, verify: str, began: float
) -> Started | None:
    """See ``start``; None where the cache lacks a piece."""
    with ThreadPoolExecutor(1, "chunkc-tokenizer") as pool:
        loading = None
        if tokenizer is None:
            loading = pool.submit(load_tokenizer, entrance.folder, found.kept.tokenizer)
        work = _preparation(found, entrance.checkpoint, began)
        if work is None:
            return None
        runner, report = _check_and_report(work, found, config, verify)
        loaded = FoundTokenizer(tokenizer) if loading is None else loading.result()
    if loaded.missing is not None:
        warnings.warn(loaded.missing, stacklevel=4)
    return Started(runner, report, loaded.tokenizer, found.kept.generation)


@contextlib.contextmanager
def _two_threads_at_work() -> Iterator[None]:
    """The interpreter's settings for a thread that imports beside one that lays out weights.

    The latter asks for the interpreter hundreds of times, and would wait 5 ms each time. Collecting garbage takes a
    third of the import's time and finds none: what is imported stays.
    """
    before, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(min(before, 5e-4))
    gc.disable()
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        if collects:
            gc.enable()


def _preparation(found: FoundStart, checkpoint: Checkpoint, began: float) -> Preparation | None:
    """The prepared model with what its weights are made of; None where the cache lacks a piece."""
    entry = artifacts.find("model", found.kept.model_key)
    pieces = None if entry is None else load_prepared(entry)
    if pieces is None:
        return None
    prepared, functions, constants = pieces
    originals = _originals(prepared, found, checkpoint, constants)
    if originals is None:
        return None
    seconds = time.perf_counter() - began
    return Preparation(prepared, lambda: functions, SOURCE, seconds, originals, prepared.made)


def _originals(
    prepared: Prepared, found: FoundStart, checkpoint: Checkpoint, constants: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """What the program's weights are made of, by name. Files stay mapped for those that are laid out anew alone."""
    weights = prepared.program.weights
    as_they_are = {name for name in weights if name not in prepared.made}
    originals = {}
    for name in {part for each in weights for part in ingredients(each, prepared.made)}:
        source = found.kept.weights.get(name)
        if source is None:
            tensor = found.buffers.get(name, constants.get(name))
            if tensor is None:
                return None
        elif source.name not in checkpoint:
            return None
        else:
            tensor = checkpoint.tensor(source.name)
            if tensor.dtype != source.dtype or name in as_they_are:
                saved, tensor = tensor, tensor.to(source.dtype, copy=True)
                take_back(saved)
        originals[name] = tensor
    return originals


def _check_and_report(
    work: Preparation, found: FoundStart, config: EngineConfig, verify: str
) -> tuple[GraphRunner, CompileReport]:
    """The runner with its cache, after the check.

    Raises:
        VerificationError: the logits are not those of then.
        CapacityError: the cache does not fit.
    """
    prepared = work.prepared
    load_attention(prepared)
    start = time.perf_counter()
    graph = work.lowered(owned=True)
    prepare_seconds = work.seconds + time.perf_counter() - start
    start = time.perf_counter()
    verification = _verified(prepared, graph, found, config.page_size) if verify == "on" else None
    verify_seconds = time.perf_counter() - start
    runner, cache = make_runner(graph, prepared, config)
    report = CompileReport(
        prepared=prepared,
        source=work.source,
        prepare_seconds=prepare_seconds,
        mode="compiled",
        body=cpu_backend.active_body(),
        verification=verification,
        verify_seconds=verify_seconds,
        cache=cache,
    )
    return runner, report


def _verified(prepared: Prepared, graph: LoweredGraph, found: FoundStart, page_size: int) -> Verification:
    """What the check against the kept logits found.

    Raises:
        VerificationError: it failed.
        ValueError: they are of another probe.
    """
    prompts = probe_prompts(prepared.layers, prepared.vocab_size, prepared.longest)
    expected = recorded(found.logits, prompts)
    return verify_graph(prepared, graph, expected, page_size, lambda prompt, tolerance: None)
