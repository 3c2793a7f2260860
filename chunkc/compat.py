"""The one place that knows how the supported versions of torch and transformers differ.

Supported: torch 2.11 to 2.13 and transformers 5.17 to 5.24; later versions as long as they keep what is used here.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.fx.graph import CodeGen


@contextlib.contextmanager
def one_graph_for_every_size() -> Iterator[None]:
    """Treat a dynamic size as unknown even where its hint is 0 or 1.

    Without it export and Inductor specialise on a size of 1, and a batch of one token compiles a second graph.
    Must surround export, passes and compilation alike.
    """
    from torch.fx.experimental import _config

    with _config.patch(backed_size_oblivious=True):
        yield


@contextlib.contextmanager
def without_stack_traces() -> Iterator[None]:
    """Do not note, for every node that is traced, the lines of code that made it; torch 2.11 always does."""
    from torch.fx import config

    name = "do_not_emit_stack_traces"
    if not hasattr(config, name):
        yield
        return
    with mock.patch.object(config, name, True):
        yield


def exported_module(program: torch.export.ExportedProgram) -> fx.GraphModule:
    """The exported program as a plain GraphModule: no guards, no pytree packing around its arguments."""
    newer = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(check_guards=False) if newer else program.module()
    module.graph.set_codegen(CodeGen())
    return fx.GraphModule(module, module.graph)


def dense_mask(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> torch.Tensor:
    """Run transformers' mask builder and always get the boolean mask, never None.

    transformers leaves a mask out where it knows the kernel's ``is_causal`` flag says the same; which shortcuts
    exist differs between versions. We want the tensor, since its meaning is read from it.
    """
    from transformers.masking_utils import sdpa_mask

    keywords = {**keywords, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    keywords.pop("dtype", None)  # a boolean mask, whatever the model computes in
    return sdpa_mask(*arguments, **keywords)


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., torch.Tensor]) -> None:
    """Register an attention function and its mask builder with transformers under ``name`` (idempotent)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
