"""The benchmark of single steps: what it counts, and its table."""

from __future__ import annotations

import functools

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import chunkc
from chunkc.bench import steps
from chunkc.bench.__main__ import main

HIDDEN, INNER, VOCAB = 16, 24, 40
LAYER = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER


def model(tied: bool):
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_step_reads_and_multiplies(tied):
    made = model(tied)
    norms = 5 * HIDDEN
    assert steps.weight_bytes(made) == 4 * (2 * LAYER + VOCAB * HIDDEN + norms), "an embedding that is not the head"
    assert steps.linear_weights(made) == 2 * LAYER


def test_the_command_prints_a_row_for_each_step(monkeypatch, capsys):
    monkeypatch.setattr(steps, "load", lambda name, dtype: (model(True), None))
    monkeypatch.setitem(vars(chunkc), "compile", functools.partial(chunkc.compile, mode="eager", verify="off"))
    arguments = "steps --dtype float32 --decodes 2 --many 3 --context 5 --prompt 20 --rounds 1"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    for text in ("decode, 2 at 5", "prefill, 20 tokens", "outside the graph, 3 decodes", "GB/s", "GFLOP/s"):
        assert text in out
