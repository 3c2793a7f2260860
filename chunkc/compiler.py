"""``chunkc.compile``: a HuggingFace causal LM in, an engine out.

model ──capture, passes, lowering, or the cache (preparation.py)──> callable ──check.py──> Engine
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from chunkc import check, preparation
from chunkc.capture import shadow
from chunkc.config import DEFAULT_BUDGET, DEFAULT_MAX_REQUESTS, DEFAULT_PAGE_SIZE, EngineConfig, Multiplex
from chunkc.errors import UnsupportedModelError, VerificationError
from chunkc.kernels import cpu_backend
from chunkc.lower import MODES, forget_weights
from chunkc.models import load, resolve_dtype
from chunkc.passes.base import GraphPass
from chunkc.passes.pipeline import PassPipeline
from chunkc.preparation import Preparation
from chunkc.prepared import Prepared
from chunkc.program import LoweredGraph
from chunkc.report import CompileReport
from chunkc.runtime.cache_size import choose_num_pages
from chunkc.runtime.engine import Engine
from chunkc.runtime.machine import CORES
from chunkc.runtime.multiplex import division_of
from chunkc.runtime.runner import GraphRunner, bytes_per_page
from chunkc.runtime.thread_limits import settle_threads

#: at most, of the pages that the check runs on
_PROBE_PAGE_SIZE = 16
#: neither torch.export nor Inductor can do two at once in a process
_one_at_a_time = threading.Lock()


def compile(
    model: nn.Module | str | Path,
    budget: int | None = DEFAULT_BUDGET,
    *,
    tokenizer: Any = None,
    dtype: str | torch.dtype | None = None,
    page_size: int = DEFAULT_PAGE_SIZE,
    num_pages: int | None = None,
    cache_memory: int | str | None = None,
    max_requests: int = DEFAULT_MAX_REQUESTS,
    multiplex: Multiplex = "off",
    decode_cores: int | None = None,
    verify: Literal["on", "off"] = "on",
    mode: Literal["compiled", "eager"] = "compiled",
    passes: Sequence[GraphPass | str] | PassPipeline = (),
    dump: str | Path | None = None,
) -> Engine:
    """Compile a causal LM into an engine that serves it with chunked prefill.

    It computes on ``torch.get_num_threads()`` threads. Where those are torch's default and the process's control group
    allows fewer, torch's number is lowered first, with a warning.

    Args:
        model: a HuggingFace causal LM, or a name, folder or GGUF file to load with its tokenizer. A model object is not
            changed. The engine shares some of its weights and has copies of others (those of linears, laid out anew),
            so do not change them in place while it serves: compile again. Of a model loaded by name nothing is kept
            twice: each weight goes when it is laid out, and memory peaks little above the weights and the cache.
        budget: tokens per iteration, decodes and prefill chunks together; None runs each prompt whole.
        tokenizer: a HuggingFace tokenizer, for text prompts; comes along where ``model`` is loaded here.
        dtype: "float32", "bfloat16", "float16" or the torch dtype; None keeps the model's.
        page_size: tokens per page of the key/value cache.
        num_pages: pages in the cache; or
        cache_memory: bytes for it, as a number or "2GiB". By default a share of the free memory.
        max_requests: requests in progress at a time; more wait.
        multiplex: how prefill and decode share the machine: "off", in one batch; "layers", in turns, the decodes
            through all layers and then the prompts through a few of them; "streams", at the same time, on cores of
            their own (the budget is then the size of a prompt's pieces). Can be changed while serving
            (``engine.multiplex``).
        decode_cores: with "streams", cores for the decodes; the others are for the prefill. None measures what the two
            cost each other (some seconds) and goes by that.
        verify: "on" compares the compiled graph's logits with the model's before handing out the engine.
        mode: "compiled" by Inductor, or "eager", op by op, for debugging.
        passes: passes beside the core ones (instances or registered names), or a whole ``PassPipeline``.
        dump: folder for the readable graph after every pass.

    Returns:
        an engine; ``engine.explain()`` shows what was done.

    Raises:
        UnsupportedModelError: the model cannot be served right; names op, module, reason and what to do.
        VerificationError: (one of the former) the compiled graph's logits are not the model's.
        CapacityError: the cache does not fit.
        ModelLoadError: there is no such model.
        ValueError: an option has a bad value.
    """
    if mode not in MODES or verify not in ("on", "off"):
        raise ValueError(f"mode is one of {', '.join(MODES)} and verify is on or off, not {mode!r} and {verify!r}")
    config = EngineConfig(
        budget=budget,
        max_requests=max_requests,
        page_size=page_size,
        num_pages=num_pages,
        cache_memory=cache_memory,
        multiplex=multiplex,
        decode_cores=decode_cores,
    )
    settle_threads()
    if multiplex == "streams" or decode_cores is not None:
        division_of(decode_cores, CORES.divisions())  # raises where there is none, before the work
    given = model
    if isinstance(model, (str, Path)):
        model, loaded_tokenizer = load(model, dtype=dtype)
        tokenizer = tokenizer if tokenizer is not None else loaded_tokenizer
    reference = _reference(model, resolve_dtype(dtype))
    generation_config = getattr(model, "generation_config", None)
    owned = model is not given
    if owned:
        forget_weights(model)
    reload = functools.partial(_reload, given, dtype)
    if isinstance(passes, str):
        passes = [passes]
    key = None if passes or dump is not None or mode != "compiled" else preparation.key_for(reference)
    work = preparation.from_cache(key, reference)
    if work is not None:
        try:
            runner, report = _check_and_report(work, reference, reload, owned, config, verify, mode)
        except VerificationError as error:
            said = f"what the cache holds of this model fails the check ({error.reason}); it is made again"
            warnings.warn(said, RuntimeWarning, stacklevel=2)
            preparation.forget(key)
            work, reference = None, reload()
    if work is None:
        with _one_at_a_time:
            work = preparation.from_scratch(reference, passes=passes, dump=dump, mode=mode)
        runner, report = _check_and_report(work, reference, reload, owned, config, verify, mode)
        if verify == "on":
            preparation.keep(key, work)
    _say_what_is_limited(work.prepared)
    engine = Engine(
        runner,
        config=config,
        tokenizer=tokenizer,
        generation_config=generation_config,
        report=report,
    )
    if multiplex == "streams" and decode_cores is None:
        engine.calibrate()
    return engine


def _check_and_report(
    work: Preparation,
    reference: nn.Module,
    reload: Callable[[], nn.Module],
    owned: bool,
    config: EngineConfig,
    verify: str,
    mode: str,
) -> tuple[GraphRunner, CompileReport]:
    """The runner with its cache, after the check.

    Args:
        work: its weights are made here, of those of ``reference``.
        reference: the untouched model. It is asked for the logits to compare with, and then loses its tensors.
        reload: gives another like it.
        owned: nobody else holds those tensors.

    Raises:
        VerificationError: the logits are not the model's.
        CapacityError: the cache does not fit.
    """
    cpu_backend.load()
    prepared = work.prepared
    start = time.perf_counter()
    expected = (
        check.expect(reference, prepared.layers, prepared.vocab_size, prepared.longest) if verify == "on" else None
    )
    verify_seconds = time.perf_counter() - start
    forget_weights(reference)
    start = time.perf_counter()
    graph = work.lowered(owned=owned)
    prepare_seconds = work.seconds + time.perf_counter() - start
    runner, cache = _make_runner(graph, prepared, config)
    verification = None
    if expected is not None:
        start = time.perf_counter()
        verification = _verify(work, graph, expected, config.page_size, reload)
        verify_seconds += time.perf_counter() - start
    report = CompileReport(
        prepared=prepared,
        source=work.source,
        prepare_seconds=prepare_seconds,
        mode=mode,
        body=cpu_backend.active_body(),
        verification=verification,
        verify_seconds=verify_seconds,
        cache=cache,
    )
    return runner, report


def _reload(given: nn.Module | str | Path, dtype: str | torch.dtype | None) -> nn.Module:
    """The model to be served once more, since the first one's weights were let go of."""
    model = load(given, dtype=dtype)[0] if isinstance(given, (str, Path)) else given
    return _reference(model, resolve_dtype(dtype))


def _reference(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """The model as it is to be served: in evaluation mode and in ``dtype``, sharing what it can.

    Raises:
        UnsupportedModelError: not a module, on a device, of a dtype or with quantised weights that cannot be served.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"model is a {type(model).__name__}, neither a torch module nor the name or path of a model"
        )
    parameters = list(model.parameters())
    devices = sorted({parameter.device.type for parameter in parameters})
    if devices not in ([], ["cpu"]):
        raise UnsupportedModelError(
            f"the model's parameters are on {', '.join(devices)}; only the CPU is served so far",
            hint="Move it with model.to('cpu'), or give its name or path.",
        )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedModelError(
            "the model's weights are quantised", hint="Load it dequantised; GGUF files are dequantised on loading."
        )
    served = shadow(model, dtype)
    dtypes = {p.dtype for p in served.parameters() if p.is_floating_point()}
    if not dtypes <= set(check.TOLERANCE):
        names = ", ".join(sorted(str(d).removeprefix("torch.") for d in dtypes))
        raise UnsupportedModelError(
            f"the model's parameters are {names}", hint="Give dtype='float32', 'bfloat16' or 'float16'."
        )
    return served


def _make_runner(graph: LoweredGraph, prepared: Prepared, config: EngineConfig) -> tuple[GraphRunner, str]:
    """The runner with its cache, and a line that says how large that is."""
    page_bytes = bytes_per_page(prepared.layers, config.page_size)
    num_pages = choose_num_pages(
        num_pages=config.num_pages,
        cache_memory=config.cache_memory,
        bytes_per_page=page_bytes,
        page_size=config.page_size,
        max_requests=config.max_requests,
        max_positions=prepared.longest,
    )
    tokens = num_pages * config.page_size
    mebibytes = num_pages * page_bytes / 2**20
    said = f"cache: {num_pages} pages of {config.page_size} tokens ({tokens} tokens, {mebibytes:.0f} MiB)"
    return _runner(graph, prepared, config.page_size, num_pages), said


def _runner(graph: LoweredGraph, prepared: Prepared, page_size: int, num_pages: int) -> GraphRunner:
    return GraphRunner(
        graph,
        prepared.layers,
        vocab_size=prepared.vocab_size,
        max_positions=prepared.longest,
        page_size=page_size,
        num_pages=num_pages,
    )


def _verify(
    work: Preparation, graph: LoweredGraph, expected: check.Expected, page_size: int, reload: Callable[[], nn.Module]
) -> check.Verification:
    """The check runs on pages of its own: its room does not depend on the size of the cache, and its short prompts lie
    on several pages."""
    page_size = min(page_size, _PROBE_PAGE_SIZE)

    def find_module(prompt: torch.Tensor, tolerance: float) -> str | None:
        if work.before_lowering is None:
            return None
        model = reload()
        found = work.runnable(model)
        return None if found is None else check.first_difference(found, model, prompt, tolerance)

    lengths = [len(prompt) for prompt in expected.prompts]
    probe = _runner(graph, work.prepared, page_size, check.probe_pages(lengths, page_size))
    return check.verify(probe, expected, find_module)


def _say_what_is_limited(prepared: Prepared) -> None:
    if prepared.proven_length is not None and prepared.proven_length < (prepared.max_positions or sys.maxsize):
        warnings.warn(
            f"the meaning of this model's attention mask is proven up to {prepared.proven_length} tokens only; longer "
            "requests are refused",
            stacklevel=3,
        )
