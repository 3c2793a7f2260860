"""``chunkc.compile``: a HuggingFace causal LM in, an engine out.

folder that was served before ──folder_start.py──┐
any other model ───────────────model_start.py────┴──> runner ──> Engine
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from chunkc import early_builds, folder_start
from chunkc.clean_process import NotClean
from chunkc.config import DEFAULT_BUDGET, DEFAULT_MAX_REQUESTS, DEFAULT_PAGE_SIZE, MODES, EngineConfig, Multiplex
from chunkc.entrance import enter
from chunkc.prepared import Prepared
from chunkc.runtime.engine import Engine
from chunkc.runtime.machine import CORES
from chunkc.runtime.multiplex import division_of
from chunkc.runtime.thread_limits import settle_threads

if TYPE_CHECKING:
    from chunkc.passes.base import GraphPass
    from chunkc.passes.pipeline import PassPipeline


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
        verify: "on" compares the compiled graph's logits with the model's before handing out the engine; of a folder
            that was served before, with the model's logits that were kept.
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
    entrance = started = detour = None
    if isinstance(model, (str, Path)) and mode == "compiled" and not passes and dump is None:
        try:
            entrance = enter(model, dtype, page_size)
        except NotClean as error:
            detour = str(error)
    if entrance is not None:
        started = folder_start.start(entrance, config, tokenizer=tokenizer, verify=verify)
    if started is None:
        early_builds.begin(early_builds.likely_dtype(model, dtype))
        from chunkc import model_start  # capture and passes, which a start from a folder can do without

        started = model_start.start(
            model,
            config,
            tokenizer=tokenizer,
            dtype=dtype,
            verify=verify,
            mode=mode,
            passes=passes,
            dump=dump,
            entrance=entrance,
        )
        started = replace(started, report=replace(started.report, detour=detour))
    _say_what_is_limited(started.report.prepared)
    engine = Engine(
        started.runner,
        config=config,
        tokenizer=started.tokenizer,
        generation_config=started.generation_config,
        report=started.report,
    )
    if multiplex == "streams" and decode_cores is None:
        engine.calibrate()
    return engine


def _say_what_is_limited(prepared: Prepared) -> None:
    if prepared.proven_length is not None and prepared.proven_length < (prepared.max_positions or sys.maxsize):
        warnings.warn(
            f"the meaning of this model's attention mask is proven up to {prepared.proven_length} tokens only; longer "
            "requests are refused",
            stacklevel=3,
        )
