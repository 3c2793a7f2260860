"""Llamas with one part exchanged: some cannot be served in chunks, some can and must be compiled right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny import build, randomize
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel


def llama_with(part: str, module: nn.Module) -> PreTrainedModel:
    """A tiny Llama of one layer whose ``model.layers.0.{part}`` is ``module``, with random parameters."""
    model = build("llama", num_hidden_layers=1)
    randomize(module, seed=3)
    setattr(model.model.layers[0], part, module.eval())
    return model


class ConvMLP(nn.Module):
    """A causal convolution over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, kernel_size=3, padding=2, groups=64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


class RunningMeanMLP(nn.Module):
    """The mean over all tokens so far: causal, but each chunk would need the ones before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class BatchNormMLP(nn.Module):
    """Batch norm over channels, by running statistics or, even in evaluation mode, by those of the tokens at hand."""

    def __init__(self, *, of_the_batch: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64, track_running_stats=not of_the_batch)
        if not of_the_batch:
            generator = torch.Generator().manual_seed(5)
            self.norm.running_mean.copy_(torch.randn(64, generator=generator) * 0.3)
            self.norm.running_var.copy_(torch.rand(64, generator=generator) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class CountingMLP(nn.Module):
    """Keeps a state of its own between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class HandAttention(nn.Module):
    """Attention with 4 heads and without positions, written out by hand.

    Args:
        mask: makes the mask of so many tokens: bool [S, S] (True = attend), additive, or None.
        scale: of the scores.
        steps: what else happens to the scores before the mask.
        sdpa: call ``scaled_dot_product_attention`` in place of writing it out; without ``steps``.
    """

    def __init__(
        self,
        mask: Callable[[int], torch.Tensor | None],
        *,
        scale: float = 0.25,
        steps: Callable[[torch.Tensor], torch.Tensor] = lambda scores: scores,
        sdpa: bool = False,
    ) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.mask, self.scale, self.steps, self.sdpa = mask, scale, steps, sdpa

    def forward(self, hidden_states: torch.Tensor, **unused: Any) -> tuple[torch.Tensor, None]:
        heads = (*hidden_states.shape[:2], 4, 16)
        q, k, v = (part(hidden_states).view(heads).transpose(1, 2) for part in (self.q, self.k, self.v))
        mask = self.mask(hidden_states.shape[1])
        if self.sdpa:
            result = functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        else:
            scores = self.steps(q @ k.transpose(-1, -2) * self.scale)
            if mask is not None:
                scores = scores.masked_fill(~mask, -1e9) if mask.dtype == torch.bool else scores + mask
            result = scores.softmax(-1) @ v
        return self.o(result.transpose(1, 2).flatten(2)), None


class MasksPadding(nn.Module):
    """A causal LM that takes token 0 for padding and hides it from all others."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("llama", num_hidden_layers=1)
        self.config = self.inner.config

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        mask = (input_ids != 0).long()
        return self.inner(input_ids, attention_mask=mask, position_ids=position_ids, use_cache=False).logits


def distances(size: int) -> torch.Tensor:
    """int64 [S, S]: how far key j lies before query i."""
    index = torch.arange(size)
    return index[:, None] - index[None, :]


def causal(size: int) -> torch.Tensor:
    """bool [S, S]: query i sees key j iff j <= i."""
    return distances(size) >= 0
