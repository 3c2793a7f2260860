"""Capture and compile work on a shadow: the caller's model, and transformers, stay as they were."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tiny import VOCAB, assert_same_tokens, build, generate_hf, greedy_references
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, masking_utils

import chunkc
from chunkc.capture import INTERFACE, capture, logits_of, shadow
from chunkc.config import SamplingParams
from chunkc.errors import InvalidRequestError, UnsupportedModelError
from chunkc.passes.pipeline import PassPipeline

PROMPT = torch.arange(3, 20)[None]
POSITIONS = torch.arange(17)[None]


def same_storage(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.data_ptr() == second.data_ptr()


def test_a_shadow_shares_parameters_and_buffers_but_no_module_or_configuration():
    model = build("llama")
    copied = shadow(model)
    theirs = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    ours = dict(copied.named_parameters(remove_duplicate=False)) | dict(copied.named_buffers(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    assert all(ours[name] is theirs[name] for name in theirs)
    assert not {id(module) for module in model.modules()} & {id(module) for module in copied.modules()}
    assert copied.config is not model.config and copied.model.config is not model.model.config


def test_a_shadow_keeps_ties():
    for dtype in (None, torch.bfloat16):
        copied = shadow(build("gpt2"), dtype)
        assert copied.lm_head.weight is copied.transformer.wte.weight


def test_a_shadow_of_another_dtype_leaves_the_callers_parameters_alone():
    model = build("llama")
    before = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    copied = shadow(model, torch.bfloat16)
    assert {parameter.dtype for parameter in copied.parameters()} == {torch.bfloat16}
    assert copied.config.dtype == torch.bfloat16 and model.config.dtype != torch.bfloat16
    for name, parameter in model.named_parameters():
        object_before, value_before = before[name]
        assert parameter is object_before and parameter.dtype == torch.float32
        assert torch.equal(parameter, value_before)


def test_a_shadow_of_another_dtype_is_what_from_pretrained_loads(tmp_path):
    model = build("gemma3_text")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    copied = shadow(model, torch.bfloat16)
    assert loaded.model.rotary_emb.full_attention_inv_freq.dtype == torch.float32
    assert copied.model.rotary_emb.full_attention_inv_freq.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(copied(PROMPT).logits, loaded(PROMPT).logits)


def test_a_shadow_is_in_evaluation_mode_and_the_model_stays_in_training_mode():
    model = build("gpt2").train()
    model.transformer.h[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    assert not any(module.training for module in shadow(model).modules())
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_a_model_in_training_mode_is_served_without_its_dropout():
    model = build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = generate_hf(model, [3, 1, 4, 1, 5], 6).tokens
    engine = chunkc.compile(model.train(), mode="eager", num_pages=8)
    assert model.training and model.transformer.drop.training
    (completion,) = engine.generate([3, 1, 4, 1, 5], chunkc.SamplingParams(max_new_tokens=6))
    assert completion.token_ids == expected


def test_dtype_serves_a_conversion_and_leaves_the_model_alone():
    model = build("llama")
    before = copy.deepcopy(model.state_dict())
    engine = chunkc.compile(model, mode="eager", num_pages=8, dtype="bfloat16")
    assert {layer.dtype for layer in engine._report.layers} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    (completion,) = engine.generate([5, 6, 7], chunkc.SamplingParams(max_new_tokens=4))
    assert len(completion.token_ids) == 4


@pytest.mark.parametrize("route", ["interface", "as_it_stands"])
def test_the_captured_graph_computes_the_models_logits_at_any_length(route):
    model = build("mistral")
    graph_module = capture(shadow(model), route).graph_module
    for length in (1, 2, 17, 50):
        ids = torch.arange(length)[None] % VOCAB
        with torch.no_grad():
            logits = graph_module(ids, torch.arange(length)[None])
            expected = logits_of(model, ids, torch.arange(length)[None])
        torch.testing.assert_close(logits[0] if isinstance(logits, tuple) else logits, expected, atol=1e-5, rtol=1e-5)


def test_capture_leaves_transformers_usable():
    models = {name: build(name, attention) for name, attention in (("llama", "sdpa"), ("gemma2", "eager"))}
    with torch.no_grad():
        before = {name: model(PROMPT).logits for name, model in models.items()}
    for model in models.values():
        capture(shadow(model), "interface")
    with torch.no_grad():
        for name, model in models.items():
            assert torch.equal(model(PROMPT).logits, before[name])
            assert model.config._attn_implementation != INTERFACE
    # what was there is there, and new models get it
    assert "sdpa" in AttentionInterface() and "sdpa" in AttentionMaskInterface()
    again = build("llama")
    with torch.no_grad():
        assert torch.equal(again(PROMPT).logits, before["llama"])
    again.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(again(PROMPT).logits, before["llama"], atol=1e-4, rtol=1e-4)


def test_capture_again_gives_the_same_graph():
    model = build("llama")
    graphs = [str(capture(shadow(model), "interface").graph_module.graph) for _ in range(2)]
    assert graphs[0] == graphs[1]


def test_lines_of_code_are_noted_where_somebody_reads_them():
    model = shadow(build("llama"))
    graphs = [capture(model, "interface", readable=readable).graph_module.graph for readable in (True, False)]
    lines = [{node.stack_trace for node in graph.nodes if node.op == "call_function"} for graph in graphs]
    noted = [any("modeling_llama.py" in (text or "") for text in texts) for texts in lines]
    assert noted[0] and str(graphs[0]) == str(graphs[1])
    import torch.fx.config

    if hasattr(torch.fx.config, "do_not_emit_stack_traces"):  # newer than torch 2.11
        assert not noted[1] and not torch.fx.config.do_not_emit_stack_traces


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_afterwards_as_before(collects, monkeypatch):
    before = gc.isenabled()
    try:
        gc.enable() if collects else gc.disable()
        chunkc.compile(build("llama"), mode="eager", num_pages=8)
        assert gc.isenabled() == collects
        with pytest.raises(chunkc.UnsupportedModelError):
            chunkc.compile(build("llama"), mode="eager", passes=PassPipeline([]))
        assert gc.isenabled() == collects
    finally:
        gc.enable() if before else gc.disable()


def test_a_module_that_cannot_be_copied_is_told():
    model = build("llama")
    model.handle = (number for number in range(3))
    with pytest.raises(UnsupportedModelError, match=r"cannot be copied.*generator"):
        chunkc.compile(model, mode="eager")


def test_hooks_of_the_callers_modules_are_not_lost():
    model = build("llama")
    seen = []
    handle = model.model.layers[0].register_forward_hook(lambda module, args, output: seen.append(1))
    chunkc.compile(model, mode="eager", num_pages=8, verify="off")
    seen.clear()
    with torch.no_grad():
        model(PROMPT)
    assert seen == [1]
    handle.remove()


def test_logits_come_from_whatever_a_model_returns():
    class Bare(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids[..., None].float()

    class Pair(nn.Module):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
            return (input_ids + position_ids)[..., None].float(), 3

    assert torch.equal(logits_of(Bare(), PROMPT, POSITIONS), PROMPT[..., None].float())
    assert torch.equal(logits_of(Pair(), PROMPT, POSITIONS), (PROMPT + POSITIONS)[..., None].float())


class BranchesOnLength(nn.Module):
    """A model whose code asks how many tokens there are; ``asks(length)`` chooses between two factors."""

    def __init__(self, asks):
        super().__init__()
        torch.manual_seed(0)
        self.asks = asks
        self.embed, self.qkv, self.head = nn.Embedding(40, 16), nn.Linear(16, 48), nn.Linear(16, 40)

    def forward(self, input_ids, position_ids):
        x = self.embed(input_ids)
        x = x * 3 if self.asks(x.shape[1]) else x * -2
        q, k, v = (part.view(1, -1, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + attended.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize(
    "asks",
    [lambda n: n % 2 == 1, lambda n: n != 77, lambda n: n != 7919, lambda n: n > 12, lambda n: 12 < n < 50_000],
    ids=["odd", "not 77", "a far number", "more than 12", "between two"],
)
def test_code_that_branches_on_the_number_of_tokens_is_refused(asks):
    with pytest.raises(UnsupportedModelError, match=r"branches on how many tokens"):
        chunkc.compile(BranchesOnLength(asks).eval(), mode="eager", num_pages=8, verify="off")


def test_code_for_short_sequences_serves_those_and_batches_of_any_size():
    model = BranchesOnLength(lambda n: n < 50).eval()
    with pytest.warns(UserWarning, match="up to 49 tokens only"):
        engine = chunkc.compile(model, mode="eager", num_pages=32, budget=120)
    prompts = [torch.randint(40, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (48, 48, 30, 7)]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        expected.append(model(ids, torch.arange(len(prompt))[None])[0, -1].argmax().item())
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=1))
    assert [completion.token_ids for completion in completions] == [[token] for token in expected]
    assert max(record.tokens for record in engine.metrics.records) > 49
    with pytest.raises(InvalidRequestError, match="49"):
        engine.generate([list(range(30)) * 2], SamplingParams(max_new_tokens=1))


def test_a_branch_for_one_token_alone_is_found_by_the_check():
    """Export's guards cannot tell it from what strides ask; the check runs a prompt of one token."""
    with pytest.raises(UnsupportedModelError, match="logits differ"):
        chunkc.compile(BranchesOnLength(lambda n: n > 1).eval(), mode="eager", num_pages=8)


def test_the_number_of_tokens_as_a_factor_is_refused():
    class Scaled(BranchesOnLength):
        def forward(self, input_ids, position_ids):
            return super().forward(input_ids, position_ids) / input_ids.shape[1]

    with pytest.raises(UnsupportedModelError, match="number of tokens"):
        chunkc.compile(Scaled(lambda n: True).eval(), mode="eager", num_pages=8, verify="off")


def windowed(module, query, key, value, attention_mask, scaling=None, **keywords):
    """An attention of the user's own: sees the last 70 tokens, whatever the mask says."""
    places = torch.arange(query.shape[2])
    seen = (places[None] <= places[:, None]) & (places[None] > places[:, None] - 70)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    output = nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


def test_an_attention_of_the_users_own_is_served_and_not_replaced():
    AttentionInterface.register("windowed_of_mine", windowed)
    AttentionMaskInterface.register("windowed_of_mine", masking_utils.sdpa_mask)
    model = build("llama")
    model.set_attn_implementation("windowed_of_mine")
    engine = chunkc.compile(model, mode="eager", num_pages=64)
    assert {layer.shape.window for layer in engine._report.layers} == {70}
    (reference,) = greedy_references(model, (150,), 5, use_cache=False)
    assert_same_tokens(engine.generate([reference.prompt], SamplingParams(max_new_tokens=5))[0].token_ids, reference)


def test_weights_that_are_not_finite_are_the_models_own_fault():
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(UnsupportedModelError, match=r"own logits are not finite.*NaN or infinity in its weights"):
        chunkc.compile(model, mode="eager", num_pages=8)


def test_two_threads_compile_at_once():
    models = [build("llama", seed=1), build("gpt2", seed=2)]
    with ThreadPoolExecutor() as pool:
        engines = list(pool.map(lambda model: chunkc.compile(model, mode="eager", num_pages=8), models))
    for model, engine in zip(models, engines, strict=True):
        (reference,) = greedy_references(model, (9,), 4)
        assert_same_tokens(
            engine.generate([reference.prompt], SamplingParams(max_new_tokens=4))[0].token_ids, reference
        )
