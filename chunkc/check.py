"""The check at compile: the compiled graph, in mixed batches, against the untouched model.

The model's own logits of four random prompts are computed first, since its weights are let go of where nobody else
needs them. Then the prompts run through the runner (``chunkc.probe``), and the logits of every token are compared. A
difference beyond rounding is an error that names the first module whose output differs, and no engine is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from chunkc.errors import UnsupportedModelError, VerificationError
from chunkc.model_call import logits_of
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.probe import probe_prompts, run_mixed
from chunkc.runtime.runner import ModelRunner

#: largest error of a row of logits, as a fraction of that row's spread, by dtype: what rounding explains
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.25}
#: fraction of rows that must keep within it; in half precision a near tie may route a token to another expert
_ROWS_WITHIN = {torch.float32: 1.0, torch.float16: 0.9, torch.bfloat16: 0.9}
#: rows of logits that are compared at a time: they may be large, and are made double
_ROWS_AT_A_TIME = 4


@dataclass(frozen=True)
class Verification:
    """What the check found.

    Attributes:
        worst: largest error of a row of logits, relative to the row's spread.
        rows: how many rows were compared.
        tolerance: what was allowed.
        rows_within: fraction of the rows that had to keep within it.
        against: what they were compared with, in words.
    """

    worst: float
    rows: int
    tolerance: float
    rows_within: float
    against: str


class Expected(Protocol):
    """What is to come out of the probe.

    Attributes:
        prompts: int64 [S].
        dtype: that the model computes its logits in.
        source: whose logits they are, in words.
    """

    prompts: tuple[torch.Tensor, ...]
    dtype: torch.dtype
    source: str

    def row_errors(self, prompt: int, start: int, end: int, logits: torch.Tensor) -> torch.Tensor:
        """Root mean square difference of each row over the row's standard deviation, double [end - start].

        Args:
            prompt: its number.
            start, end: which of its tokens.
            logits: theirs, [end - start, V].
        """


@dataclass(frozen=True)
class ModelLogits:
    """The logits that the model itself gives; see ``Expected``.

    Attributes:
        logits: [S, V] for each prompt.
    """

    prompts: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]
    source: str = "the model"

    @property
    def dtype(self) -> torch.dtype:
        """That of the logits."""
        return self.logits[0].dtype

    def row_errors(self, prompt: int, start: int, end: int, logits: torch.Tensor) -> torch.Tensor:
        """See ``Expected``."""
        return row_errors(logits, self.logits[prompt][start:end])


def expect(model: nn.Module, layers: Sequence[AttentionLayer], vocab_size: int, longest: int) -> ModelLogits:
    """What the untouched model makes of the probe.

    Args:
        model: in evaluation mode and in the dtype that is to be served.
        layers: the graph's attention calls.
        vocab_size: token ids are below it.
        longest: sequence that may be served, in tokens.

    Raises:
        UnsupportedModelError: the model's own logits are not finite.
    """
    prompts = probe_prompts(layers, vocab_size, longest)
    logits = []
    with torch.no_grad():
        for prompt in prompts:
            logits.append(logits_of(model, prompt[None], torch.arange(len(prompt))[None])[0])
            if not logits[-1].isfinite().all():
                raise UnsupportedModelError(
                    "the model's own logits are not finite", hint="Look for NaN or infinity in its weights."
                )
    return ModelLogits(prompts, tuple(logits))


def verify(
    runner: ModelRunner, expected: Expected, find_module: Callable[[torch.Tensor, float], str | None]
) -> Verification:
    """Compare the runner's logits with those that are right.

    Args:
        runner: its pages are written to; must have room for the probe.
        expected: those.
        find_module: names, for a prompt with a wrong result and the tolerance, the module where the difference starts.

    Raises:
        VerificationError: the logits differ by more than rounding.
    """
    errors = [torch.full((len(prompt),), float("nan"), dtype=torch.double) for prompt in expected.prompts]
    for request, start, end, logits in run_mixed(runner, expected.prompts):
        errors[request][start:end] = expected.row_errors(request, start, end, logits)
    rows = torch.cat(errors)
    tolerance = TOLERANCE[expected.dtype]
    within = (rows <= tolerance).double().mean()  # NaN is not within
    if within < _ROWS_WITHIN[expected.dtype]:
        first = next(i for i, error in enumerate(errors) if not bool((error <= tolerance).all()))
        raise VerificationError(
            f"the compiled graph's logits differ from the model's (row error {float(rows.max()):.2g} of the logits' "
            f"spread, {tolerance:.2g} allowed, {float(within):.0%} of rows within)",
            op="logits",
            module=find_module(expected.prompts[first], tolerance),
            hint="Please report it with the model's configuration. verify='off' would serve these wrong logits.",
        )
    return Verification(float(rows.max()), len(rows), tolerance, _ROWS_WITHIN[expected.dtype], expected.source)


def row_errors(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Root mean square difference of each row over the row's standard deviation. [S, V] twice -> [S]."""
    errors = []
    for ours, theirs in zip(logits.split(_ROWS_AT_A_TIME), expected.split(_ROWS_AT_A_TIME), strict=True):
        theirs = theirs.double()
        difference = theirs - ours
        errors.append(difference.pow_(2).mean(dim=-1).sqrt() / theirs.std(dim=-1).clamp_min(1e-6))
    return torch.cat(errors)
