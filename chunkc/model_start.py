"""From a model object, given or loaded, to one that can be served.

model ──capture, passes, lowering, or the cache (preparation.py)──> callable ──check.py──> runner
"""

from __future__ import annotations

import functools
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from chunkc import check, faulty_module, preparation, start_draft
from chunkc.assembly import Preparation
from chunkc.capture import shadow
from chunkc.config import EngineConfig
from chunkc.entrance import Entrance
from chunkc.errors import UnsupportedModelError, VerificationError
from chunkc.kernels import cpu_backend
from chunkc.models import load, resolve_dtype
from chunkc.passes.base import GraphPass
from chunkc.passes.pipeline import PassPipeline
from chunkc.program import forget_weights
from chunkc.report import CompileReport
from chunkc.runtime.runner import GraphRunner
from chunkc.serving import Started, load_attention, make_runner
from chunkc.serving import verify as verify_graph

#: neither torch.export nor Inductor can do two at once in a process
_one_at_a_time = threading.Lock()


def start(
    given: nn.Module | str | Path,
    config: EngineConfig,
    *,
    tokenizer: Any,
    dtype: str | torch.dtype | None,
    verify: str,
    mode: str,
    passes: Sequence[GraphPass | str] | PassPipeline,
    dump: str | Path | None,
    entrance: Entrance | None,
) -> Started:
    """Prepare a model, or take what the cache holds of it, and check it. See ``chunkc.compile`` for the arguments.

    Args:
        entrance: of the folder that is ``given``, where its start is to be kept.
    """
    model, loaded_tokenizer = load(given, dtype=dtype) if isinstance(given, (str, Path)) else (given, None)
    reference = _reference(model, resolve_dtype(dtype))
    generation_config = getattr(model, "generation_config", None)
    owned = model is not given
    if owned:
        forget_weights(model)
    reload = functools.partial(_reload, given, dtype)
    if isinstance(passes, str):
        passes = [passes]
    key = None if passes or dump is not None or mode != "compiled" else preparation.key_for(reference)

    drafting = entrance if verify == "on" else None

    work = preparation.from_cache(key, reference)
    if work is not None:
        draft = start_draft.draft(drafting, key, reference, work.prepared, loaded_tokenizer)
        try:
            runner, report, expected = _check_and_report(work, reference, reload, owned, config, verify, mode)
        except VerificationError as error:
            said = f"what the cache holds of this model fails the check ({error.reason}); it is made again"
            warnings.warn(said, RuntimeWarning, stacklevel=3)
            preparation.forget(key)
            work, reference = None, reload()
    if work is None:
        with _one_at_a_time:
            work = preparation.from_scratch(reference, passes=passes, dump=dump, mode=mode)
        draft = start_draft.draft(drafting, key, reference, work.prepared, loaded_tokenizer)
        runner, report, expected = _check_and_report(work, reference, reload, owned, config, verify, mode)
        if verify == "on":
            preparation.keep(key, work)
    if draft is not None and expected is not None:
        start_draft.keep(draft, expected)
    return Started(runner, report, tokenizer if tokenizer is not None else loaded_tokenizer, generation_config)


def _check_and_report(
    work: Preparation,
    reference: nn.Module,
    reload: Callable[[], nn.Module],
    owned: bool,
    config: EngineConfig,
    verify: str,
    mode: str,
) -> tuple[GraphRunner, CompileReport, check.ModelLogits | None]:
    """The runner with its cache, after the check, and the logits that it was checked against.

    Args:
        work: its weights are made here, of those of ``reference``.
        reference: the untouched model. It is asked for the logits to compare with, and then loses its tensors.
        reload: gives another like it.
        owned: nobody else holds those tensors.

    Raises:
        VerificationError: the logits are not the model's.
        CapacityError: the cache does not fit.
    """
    prepared = work.prepared
    load_attention(prepared)
    start = time.perf_counter()
    expected = (
        check.expect(reference, prepared.layers, prepared.vocab_size, prepared.longest) if verify == "on" else None
    )
    verify_seconds = time.perf_counter() - start
    forget_weights(reference)
    start = time.perf_counter()
    graph = work.lowered(owned=owned)
    prepare_seconds = work.seconds + time.perf_counter() - start
    runner, cache = make_runner(graph, prepared, config)
    verification = None
    if expected is not None:
        start = time.perf_counter()
        find_module = functools.partial(_find_module, work, reload)
        verification = verify_graph(prepared, graph, expected, config.page_size, find_module)
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
    return runner, report, expected


def _find_module(
    work: Preparation, reload: Callable[[], nn.Module], prompt: torch.Tensor, tolerance: float
) -> str | None:
    """Path of the first module that the graph before compilation computes wrong, where there is such a graph."""
    if work.before_lowering is None:
        return None
    model = reload()
    found = work.runnable(model)
    return None if found is None else faulty_module.first_difference(found, model, prompt, tolerance)


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
