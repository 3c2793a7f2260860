"""The native libraries, built while a model is loaded: compilers are processes, which another core can run."""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import torch

from chunkc.kernels import libraries
from chunkc.kernels.native import instruction_sets
from chunkc.models import locate, resolve_dtype

_COMPILERS = 2  # at a time; one more, and this process would wait for them


def begin(dtype: torch.dtype | None) -> None:
    """Have the libraries built that the cache lacks, and return at once.

    Who needs one waits for its lock, and meets the error of a build that failed by building it again.

    Args:
        dtype: the model's, as far as is known; None builds for the two that models have most.
    """
    wanted = []
    for each in (torch.bfloat16, torch.float32) if dtype is None else (dtype,):
        wanted += [libraries.LINEAR[each]] if each in libraries.LINEAR else []
        wanted += [libraries.ATTENTION[each]] if each in libraries.ATTENTION else []
    wanted.append(libraries.PLANNER)
    if "avx512f" not in instruction_sets():  # most likely no kernel of ours
        wanted.append(libraries.ONEDNN)
    missing = [library for library in wanted if not library.is_built()]

    def build() -> None:
        while missing:
            with contextlib.suppress(Exception):
                missing.pop(0).find_or_build()

    for _ in range(min(_COMPILERS, len(missing))):
        threading.Thread(target=build, name="chunkc-build", daemon=True).start()


def likely_dtype(model: Any, dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype that a model will be served in, if it can be told without loading it. See ``chunkc.compile``."""
    with contextlib.suppress(Exception):  # what is wrong with the model, its loading tells
        if dtype is not None:
            return resolve_dtype(dtype)
        if isinstance(model, torch.nn.Module):
            return next(p.dtype for p in model.parameters() if p.is_floating_point())
        place = locate(model)
        if isinstance(place, str):
            from huggingface_hub import try_to_load_from_cache  # transformers imports it, too

            place = Path(try_to_load_from_cache(place, "config.json")).parent
        return torch.float32 if place.suffix == ".gguf" else _configured(place / "config.json")
    return None


def _configured(file: Path) -> torch.dtype | None:
    """What a model's configuration says of its dtype."""
    config = json.loads(file.read_text())
    for part in (config, config.get("text_config", {})):
        name = part.get("dtype") or part.get("torch_dtype")
        if name:
            return resolve_dtype(name)
    return None
