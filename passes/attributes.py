"""Tensors of modules by their paths, as graphs name them. A leaf module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

#: attribute under which the captured wrapper holds the model; left out of the module paths shown to people
MODEL_ATTRIBUTE = "hf"


def attribute(module: nn.Module, target: str) -> Any:
    """The parameter, buffer or constant that a ``get_attr`` node names."""
    result: Any = module
    for part in target.split("."):
        result = getattr(result, part)
    return result


def set_attribute(module: nn.Module, target: str, tensor: torch.Tensor) -> None:
    """Make a tensor what a ``get_attr`` node names; the modules on the way to it must be there."""
    path, _, name = target.rpartition(".")
    module.get_submodule(path).register_buffer(name, tensor)
