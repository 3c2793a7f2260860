"""Tiny random float32 models of the architectures under test, and what HuggingFace generates with them.

    model = build("mistral")
    references = greedy_references(model, lengths=(1, 9, 40), new=10)
    assert_same_tokens(engine.generate(...), references)

Initial values would hide mistakes (a norm of ones, a bias of zeros, scores so small that attention is a plain
average), so every parameter is drawn anew, large enough that each token seen matters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

VOCAB = 211
#: largest number of tokens that the tiny models are defined for
LONGEST = 256
#: shorter than the prompts of the tests, so that windows matter
WINDOW = 6

_WITHOUT_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LONGEST,
}
_GPT_SIZES = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
_WINDOWED_THEN_FULL = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}

#: configuration of each architecture; where heads or sizes are odd, that is to tell one dimension from another
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": _SIZES,
    "qwen2": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 20},
    "mistral": {**_SIZES, "head_dim": 12, "sliding_window": WINDOW},
    "gemma2": {
        **_SIZES,
        **_WINDOWED_THEN_FULL,
        "head_dim": 16,
        "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3_text": {**_SIZES, **_WINDOWED_THEN_FULL, "head_dim": 16, "query_pre_attn_scalar": 9},
    "gpt2": _GPT_SIZES,
    "opt": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "ffn_dim": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 32,
        "max_position_embeddings": LONGEST,
        "dropout": 0.0,
    },
    "phi": {**_SIZES, "num_key_value_heads": 4},
    "gpt_neox": _SIZES,
    "falcon": {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "ffn_hidden_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "max_position_embeddings": LONGEST,
    },
    "stablelm": {**_SIZES, "use_qkv_bias": True, "qk_layernorm": True},
    "mixtral": {**_SIZES, **_EXPERTS, "sliding_window": None},
    "gptj": {**_GPT_SIZES, "rotary_dim": 8},
    "codegen": {**_GPT_SIZES, "n_ctx": LONGEST, "rotary_dim": 8},
    "cohere2": {**_SIZES, **_WINDOWED_THEN_FULL, "head_dim": 12, "logit_scale": 0.5},
    "olmo2": _SIZES,
    "phi3": {**_SIZES, "original_max_position_embeddings": LONGEST, "sliding_window": WINDOW},
    "qwen3_moe": {**_SIZES, **_EXPERTS, "head_dim": 20, "moe_intermediate_size": 24},
    "gpt_oss": {
        **_SIZES,
        **_EXPERTS,
        **_WINDOWED_THEN_FULL,
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": LONGEST // 4,
        },
    },
    "deepseek_v3": {
        **_SIZES,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
    },
    "falcon_alibi": {
        "model_type": "falcon",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "new_decoder_architecture": False,
        "multi_query": True,
        "alibi": True,
        "max_position_embeddings": LONGEST,
    },
    "bloom": {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 16},
    "mpt": {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": LONGEST},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4},
}


def build(name: str, attn_implementation: str = "sdpa", *, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """A tiny random model in evaluation mode, float32 on the CPU, without special tokens.

    Args:
        name: a key of ``CONFIGURATIONS``.
        attn_implementation: "eager" is taken where the model does not have this one.
        seed: of the weights.
        config_overrides: fields of the configuration.
    """
    settings = {**_WITHOUT_SPECIAL_TOKENS, **CONFIGURATIONS[name], **config_overrides}
    config = AutoConfig.for_model(settings.pop("model_type", name), **settings)
    if getattr(config, "attn_logit_softcapping", None):
        # SDPA has no softcap; transformers 5.17 takes it for such models all the same, and leaves the softcap out
        attn_implementation = "eager"
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    except ValueError:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model, seed)
    return model.float().eval()


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Draws every parameter anew: matrices that keep the size of what they multiply, the rest shifted a little."""
    generator = torch.Generator().manual_seed(seed)
    # small against what the layers add, or a model with tied embeddings only repeats its last token
    tables = {id(table.weight) for table in module.modules() if isinstance(table, nn.Embedding)}
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if id(parameter) in tables:
                parameter.copy_(noise * 0.03)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * 1.2 / min(parameter.shape[-2:]) ** 0.5)
            else:  # norms start at one (or at zero, where they are "one plus weight"), biases and sinks at zero
                parameter.add_(noise * 0.2)


def save_tokenizer(folder: Path) -> None:
    """Saves a tokenizer of one token a word, ``w7`` for token 7, with a chat template."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w3")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}w9"
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Reference:
    """What HuggingFace generates greedily for one prompt.

    Attributes:
        prompt: token ids.
        tokens: generated token ids, eos included.
        gaps: for each generated token, how far its logit is above the second best, as a fraction of the standard
            deviation of all logits. A gap of the size of float32 rounding (1e-6) decides nothing.
    """

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


def generate_hf(model: PreTrainedModel, prompt: Sequence[int], new: int, **options: Any) -> Reference:
    """``model.generate``, greedy.

    Args:
        new: number of tokens to generate at most.
        options: passed to ``generate``.
    """
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        result = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **{"use_cache": True, **options},
        )
    logits = torch.stack([step[0] for step in result.logits]).double()
    best = logits.topk(2).values
    gaps = (best[:, 0] - best[:, 1]) / logits.std(dim=-1)
    return Reference(list(prompt), result.sequences[0, len(prompt) :].tolist(), gaps.tolist())


def greedy_references(
    model: PreTrainedModel,
    lengths: Sequence[int],
    new: int,
    *,
    generate: Callable[..., Reference] = generate_hf,
    smallest_gap: float = 1e-4,
    seed: int = 0,
    **options: Any,
) -> list[Reference]:
    """References for random prompts of the given lengths, none of which hangs on a near tie.

    A prompt with a gap below ``smallest_gap`` (a hundred times rounding) is replaced by another. Several such in a
    row mean that the model's logits are degenerate.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for length in lengths:
        for _ in range(5):
            prompt = torch.randint(model.config.get_text_config().vocab_size, (length,), generator=generator)
            reference = generate(model, prompt.tolist(), new, **options)
            if min(reference.gaps) > smallest_gap:
                break
        else:
            raise AssertionError(f"five prompts of {length} tokens with near ties in a row")
        found.append(reference)
    return found


def assert_same_tokens(actual: Sequence[int], reference: Reference, where: str = "") -> None:
    """Token for token; a difference is told with its place and with how clear the reference's choice was."""
    expected = reference.tokens
    if list(actual) == expected:
        return
    first = next(
        (i for i, (a, b) in enumerate(zip(actual, expected, strict=False)) if a != b), min(len(actual), len(expected))
    )
    gap = f"{reference.gaps[first]:.2g}" if first < len(reference.gaps) else "none"
    raise AssertionError(
        f"{where + ': ' if where else ''}prompt of {len(reference.prompt)} tokens: token {first} of "
        f"{len(expected)} differs (the reference's best is {gap} of the logits' spread above its second)\n"
        f"  expected {expected}\n  actual   {list(actual)}"
    )
