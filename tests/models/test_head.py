"""The head's product is computed when somebody asks, and no more of it than that."""

from __future__ import annotations

import pytest
import torch
from tiny import VOCAB, build
from torch import nn

import chunkc
from chunkc import program
from chunkc.config import SamplingParams
from chunkc.errors import VerificationError
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.lower import lower
from chunkc.rewriting import rewrite
from chunkc.runtime.deferred_logits import DeferredLogits

pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32) or active_body(torch.float32) != "own", reason="no kernel of ours on this machine"
)
GREEDY = SamplingParams(max_new_tokens=6, do_sample=False, ignore_eos=True)
PROMPTS = [[5, 9, 2, 40, 7], [3], [11, 12, 13, 14, 15, 16, 17, 18, 19]]


def head_of(model: nn.Module) -> program.Head | None:
    done = rewrite(model)
    return lower(done.graph_module, "eager", done.context.resources).program.head


def hf_tokens(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, len(prompt) :].tolist()


@pytest.fixture
def asked(monkeypatch):
    """Rows that were asked for, in order: how many, and whether all of each or the best alone."""
    seen: list[tuple[str, int]] = []

    def watched(self, state, inner=program.LoweredGraph.logits):
        logits = inner(self, state)
        assert isinstance(logits, DeferredLogits)

        def note(what, call):
            seen.append((what, logits.num_rows))
            return call()

        return DeferredLogits(logits.num_rows, lambda: note("rows", logits.rows), lambda: note("best", logits.best))

    monkeypatch.setattr(program.LoweredGraph, "logits", watched)
    return seen


@pytest.mark.parametrize("multiplex", ["off", "layers"])
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_requests_have_no_logits_written_down(asked, tied, multiplex):
    model = build("llama", tie_word_embeddings=tied)
    engine = chunkc.compile(model, budget=8, mode="eager", verify="off", num_pages=64, multiplex=multiplex)
    asked.clear()
    done = engine.generate(PROMPTS, GREEDY)
    assert [each.token_ids for each in done] == [hf_tokens(model, prompt, 6) for prompt in PROMPTS]
    assert {what for what, _ in asked} == {"best"}
    assert sum(rows for _, rows in asked) == 6 * len(PROMPTS), "a row a token and no more"


def test_a_chunk_that_ends_no_prompt_asks_for_nothing(asked):
    engine = chunkc.compile(build("llama"), budget=4, mode="eager", verify="off", num_pages=64)
    engine.add_request(list(range(1, 14)), GREEDY)
    asked.clear()
    for _ in range(3):
        engine.step()
    assert asked == []
    engine.step()
    assert asked == [("best", 1)]


def test_who_samples_gets_rows_and_who_is_greedy_beside_it_the_same_token(asked):
    model = build("llama")
    engine = chunkc.compile(model, budget=64, mode="eager", verify="off", num_pages=64)
    drawn = SamplingParams(max_new_tokens=6, do_sample=True, top_k=1, ignore_eos=True)  # the best, by the other way
    asked.clear()
    done = engine.generate(PROMPTS, [GREEDY, drawn, GREEDY])
    assert [each.token_ids for each in done] == [hf_tokens(model, prompt, 6) for prompt in PROMPTS]
    assert {what for what, _ in asked} == {"rows"}


def test_best_tokens_that_are_not_those_of_the_logits_hand_out_no_engine(monkeypatch):
    def shifted(self, state, inner=program.LoweredGraph.logits):
        logits = inner(self, state)
        ids, values = logits.best()
        return DeferredLogits(logits.num_rows, logits.rows, lambda: ((ids + 1) % VOCAB, values))

    monkeypatch.setattr(program.LoweredGraph, "logits", shifted)
    with pytest.raises(VerificationError, match="best tokens") as caught:
        chunkc.compile(build("llama"), mode="eager", num_pages=64)
    assert "linear_argmax" in str(caught.value)


def test_bad_logits_end_their_request_only():
    model = build("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    engine = chunkc.compile(model, budget=64, mode="eager", verify="off", num_pages=64)
    bad, good = engine.generate([[7, 7], [5, 9]], GREEDY, errors="return")
    assert "not finite" in bad.error
    assert good.token_ids == hf_tokens(model, [5, 9], 6)


@pytest.mark.parametrize(
    ("name", "options", "taken"),
    [
        ("llama", {}, True),
        ("gpt2", {}, True),
        ("gemma2", {}, False),  # a softcap behind the product
        ("cohere2", {}, False),  # a factor
    ],
)
def test_what_is_taken(name, options, taken):
    head = head_of(build(name, **options))
    assert (head is not None) == taken
    if head is not None:
        assert head.out_features == VOCAB


def test_bfloat16_is_taken_where_its_sums_are_float32():
    head = head_of(build("llama").to(torch.bfloat16))
    assert (head is not None) == (can_pack(torch.bfloat16) and active_body(torch.bfloat16) == "own")


def test_a_head_with_a_bias():
    model = build("llama", tie_word_embeddings=False)
    model.lm_head = nn.Linear(model.lm_head.in_features, VOCAB, bias=True)
    nn.init.normal_(model.lm_head.bias)
    head = head_of(model)
    assert head is not None and head.bias is not None
    engine = chunkc.compile(model, budget=64, mode="eager", num_pages=64)
    assert engine.generate([PROMPTS[0]], GREEDY)[0].token_ids == hf_tokens(model, PROMPTS[0], 6)
