"""How a causal LM is called for its logits. A leaf module."""

from __future__ import annotations

import inspect

import torch
from torch import nn


def logits_of(model: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Logits [1, S, V] of a causal LM for ``input_ids`` and ``position_ids``, int64 [1, S]."""
    offered = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    # a keyword that only **kwargs would swallow is passed too: transformers hands position_ids down that way
    keywords = {name: v for name, v in offered.items() if name in parameters or takes_all}
    result = model(**keywords)
    if isinstance(result, torch.Tensor):
        return result
    logits = getattr(result, "logits", None)
    return logits if logits is not None else result[0]
