"""Recorded logits: errors of rows as the full comparison finds them, from little room."""

from __future__ import annotations

import pytest
import torch

from chunkc.check import ModelLogits
from chunkc.recorded_logits import record, recorded


def made(vocab_size: int, dtype: torch.dtype = torch.float32) -> ModelLogits:
    generator = torch.Generator().manual_seed(vocab_size)
    prompts = (torch.arange(20), torch.arange(3))
    logits = [3 + 2 * torch.randn(len(prompt), vocab_size, generator=generator) for prompt in prompts]
    return ModelLogits(prompts, tuple(each.to(dtype) for each in logits))


@pytest.mark.parametrize("vocab_size, within", [(211, 1e-4), (1024, 1e-4), (50_001, 0.15)])
@pytest.mark.parametrize("where", [slice(None), slice(-40, None), slice(7, 8)])
def test_errors_are_estimated_wherever_they_are(vocab_size, within, where):
    full = made(vocab_size)
    short = recorded(record(full), full.prompts)
    for prompt, start, end in ((0, 5, 20), (1, 0, 3)):
        wrong = full.logits[prompt][start:end].clone()
        wrong[:, where] += torch.randn(wrong[:, where].shape, generator=torch.Generator().manual_seed(1))
        expected = full.row_errors(prompt, start, end, wrong)
        torch.testing.assert_close(short.row_errors(prompt, start, end, wrong), expected, rtol=within, atol=1e-6)


def test_right_logits_have_no_error_and_broken_ones_are_not_small():
    full = made(5000, torch.bfloat16)
    short = recorded(record(full), full.prompts)
    assert short.dtype == torch.bfloat16
    assert short.row_errors(0, 0, 20, full.logits[0]).max() < 1e-6
    broken = full.logits[0].clone()
    broken[2, 4] = float("nan")
    assert not short.row_errors(0, 0, 20, broken)[2] < 1e9


def test_logits_of_other_prompts_are_an_error():
    full = made(50)
    for kept, prompts in ((record(full), full.prompts[:1]), ({}, full.prompts)):
        with pytest.raises(ValueError, match="another probe"):
            recorded(kept, prompts)
