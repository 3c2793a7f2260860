"""HuggingFace model -> FX graph, by torch.export, with the caller's model left as it is.

The first route sets transformers' attention interface to ours, so that every attention is one
``chunkc::attention`` call that carries its scale, softcap, sinks and *mask tensor*. The mask is built by
transformers from the model's own mask functions and stays in the graph; a later pass reads its meaning by
evaluating it. Nothing about masks is taken on trust from keyword arguments or configuration.

The second route exports the model with its own attention implementation; its SDPA or eager attention is recognised
by a pass. It serves models that do not use the interface.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

import chunkc.kernels.ops  # noqa: F401  (registers chunkc::attention)
from chunkc import compat
from chunkc.errors import UnsupportedModelError
from chunkc.functional import functional_module
from chunkc.live_code import attention_is_known
from chunkc.model_call import logits_of
from chunkc.passes.attributes import MODEL_ATTRIBUTE
from chunkc.passes.fx_tools import fake_mode_of, placeholders, symbol_of, value
from chunkc.passes.size_guards import bound_of, failing_guards

#: the name under which our attention function is registered with transformers; it must not contain "sdpa" or
#: "flex_attention", or transformers runs its own support checks on it
INTERFACE = "chunkc"

ROUTES = ("interface", "as_it_stands")

#: keyword arguments of attention functions that do not change the result
_WITHOUT_EFFECT = {
    "position_ids",
    "cache_position",
    "position_embeddings",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "past_key_values",
    "attention_mask",
}
#: keyword arguments whose meaning is in the mask as well, from which we read it
_IN_THE_MASK = {"sliding_window", "is_causal", "attention_chunk_size"}


@dataclass(frozen=True)
class Captured:
    """A captured model.

    Attributes:
        graph_module: inputs ``input_ids`` and ``position_ids``, both int64 [1, S] with S dynamic; output logits
            [1, S, V]. Parameters are the model's own tensors. No op mutates its inputs.
        route: "interface" or "as_it_stands".
        longest: longest sequence, in tokens, for which the graph is the model; None for no limit.
    """

    graph_module: fx.GraphModule
    route: str
    longest: int | None = None


def capture(model: nn.Module, route: str, *, readable: bool = True) -> Captured:
    """Export ``model`` by one route.

    Args:
        model: a causal LM in evaluation mode; not changed. Called as ``model(input_ids=..., position_ids=...,
            use_cache=False)`` with those of the keywords that its ``forward`` takes.
        route: one of ``ROUTES``.
        readable: nodes know the lines of code that made them, which ``print_readable`` shows. Takes a fifth of the
            time.

    Raises:
        UnsupportedModelError: the model cannot be exported by this route.
    """
    if route == "interface":
        for config in _configs(model):
            if not attention_is_known(config._attn_implementation):
                raise UnsupportedModelError(
                    f"its attention {config._attn_implementation!r} is a function of your own, not to be replaced"
                )
        compat.register_attention(INTERFACE, _attention_function, _mask_function)
        model = _with_attention(model, INTERFACE)
    wrapper = _LogitsOnly(model)
    # 13: any length larger than 1 that no model dimension is likely to equal
    ids = torch.arange(13, dtype=torch.int64)[None]
    sizes = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC})
    try:
        lines = contextlib.nullcontext() if readable else compat.without_stack_traces()
        with torch.no_grad(), compat.one_graph_for_every_size(), lines, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # export's own, about its internals
            program = torch.export.export(wrapper, (ids, ids.clone()), dynamic_shapes=sizes, strict=False)
            graph_module = functional_module(program)
    except UnsupportedModelError:
        raise
    except Exception as error:  # export fails in as many ways as models are written
        raise UnsupportedModelError(
            f"torch.export could not capture the model ({type(error).__name__}: {_first_line(error)})",
            hint="Control flow that depends on tensor values, or attention that needs its own mask type, "
            "cannot be captured yet.",
        ) from error
    return Captured(graph_module, route, _check_sizes(graph_module))


def _check_sizes(graph_module: fx.GraphModule) -> int | None:
    """Refuse a graph that is right only for some numbers of tokens, but for a bound from above, which is returned.

    See ``passes.size_guards`` for why a bound does no harm.
    """
    symbol = symbol_of(value(placeholders(graph_module.graph)["input_ids"]).shape[1])
    environment = fake_mode_of(graph_module.graph).shape_env
    longest = bound_of(environment, symbol)
    failing = failing_guards(environment, longest)
    if failing:
        raise UnsupportedModelError(
            f"the model's code branches on how many tokens one call has ({'; '.join(failing)})",
            hint="Chunked batches need a model that treats any number of tokens alike.",
        )
    return longest


def shadow(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of ``model`` in evaluation mode that shares its parameters, or converts them to ``dtype``.

    Conversion follows ``from_pretrained(dtype=...)``: parameters and persistent floating-point buffers are
    converted; buffers that are not saved (rotary frequencies) keep their precision.
    """
    saved = set(model.state_dict(keep_vars=True).keys())

    def convert(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if dtype is None or tensor.dtype == dtype or not tensor.is_floating_point() or name not in saved:
            return tensor
        converted = tensor.detach().to(dtype)
        return nn.Parameter(converted, requires_grad=False) if isinstance(tensor, nn.Parameter) else converted

    named = itertools.chain(model.named_parameters(), model.named_buffers())
    memo = {id(tensor): convert(name, tensor) for name, tensor in named}
    try:
        copied = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"the model object cannot be copied ({type(error).__name__}: {_first_line(error)})",
            hint="chunkc works on a copy of the module tree so that your model stays as it is.",
        ) from error
    if dtype is not None:
        for config in _configs(copied):
            config.dtype = dtype
    return copied.eval()


def _with_attention(model: nn.Module, name: str) -> nn.Module:
    """A copy of the model, sharing parameters, whose configurations name another attention implementation."""
    copied = shadow(model)
    for config in _configs(copied):
        config._attn_implementation = name
    return copied


def _configs(model: nn.Module) -> list[Any]:
    found = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


class _LogitsOnly(nn.Module):
    """Calls a causal LM with token ids and positions, and returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        setattr(self, MODEL_ATTRIBUTE, model)
        self.eval()

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        model = getattr(self, MODEL_ATTRIBUTE)
        return logits_of(model, input_ids, position_ids)


def _mask_function(*arguments: Any, **keywords: Any) -> torch.Tensor:
    return compat.dense_mask(arguments, keywords)


def _attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for each attention. query [B, Hq, S, Dk], key and value [B, Hkv, S, D*]."""
    for name, argument in keywords.items():
        if name in _WITHOUT_EFFECT or name in _IN_THE_MASK:
            continue
        if isinstance(argument, torch.Tensor):
            raise UnsupportedModelError(
                f"attention takes a tensor argument {name!r} that chunkc does not know",
                op="attention",
                module=type(module).__name__,
                hint="Of position biases, only ALiBi is supported, added to the mask.",
            )
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    causal = False
    if attention_mask is None:
        # the rule of transformers' SDPA implementation, which is what runs when a model passes no mask
        causal = keywords.get("is_causal")
        causal = bool(getattr(module, "is_causal", True)) if causal is None else bool(causal)
    output = torch.ops.chunkc.attention(
        query,
        key,
        value,
        attention_mask,
        s_aux if s_aux is not None else sinks,
        None,  # ALiBi is in the mask, from which a pass reads it
        float(scaling),
        causal,
        0,
        0,
        float(softcap or 0.0),
    )
    return output, None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"
