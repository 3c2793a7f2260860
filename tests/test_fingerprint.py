"""Equal models have equal fingerprints; what capture or a pass could see makes another; what cannot be told, none."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, masking_utils
from transformers.models.llama import modeling_llama

from chunkc.capture import shadow
from chunkc.fingerprint import fingerprint
from chunkc.live_code import CannotTell

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model(seed: int = 0, **settings) -> PreTrainedModel:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, **settings})).eval()


def test_values_of_parameters_do_not_matter():
    assert fingerprint(model(0)) == fingerprint(model(1)) == fingerprint(shadow(model(2)))


@pytest.mark.parametrize(
    "settings",
    [
        {"num_hidden_layers": 3},
        {"intermediate_size": 64},
        {"rms_norm_eps": 1e-3},
        {"hidden_act": "gelu"},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"max_position_embeddings": 100},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_matter(settings):
    assert fingerprint(model(**settings)) != fingerprint(model())


def test_dtype_matters():
    assert fingerprint(shadow(model(), torch.bfloat16)) != fingerprint(model())


def test_a_changed_member_matters():
    changed = model()
    changed.model.layers[1].self_attn.scaling *= 2
    assert fingerprint(changed) != fingerprint(model())


def test_a_changed_buffer_matters():
    changed = model()
    changed.model.rotary_emb.inv_freq[3] += 1
    assert fingerprint(changed) != fingerprint(model())


def test_weights_that_are_shared_matter():
    changed = model()
    changed.model.layers[1].mlp.up_proj.weight = changed.model.layers[0].mlp.up_proj.weight
    assert fingerprint(changed) != fingerprint(model())


def test_a_replaced_module_matters():
    changed = model()
    changed.model.layers[0].mlp.act_fn = nn.GELU()
    assert fingerprint(changed) != fingerprint(model())


class OwnNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def own_module(changed: PreTrainedModel) -> None:
    changed.model.norm = OwnNorm()


def own_forward(changed: PreTrainedModel) -> None:
    changed.model.norm.forward = types.MethodType(lambda self, x: x * 2, changed.model.norm)


def hook(changed: PreTrainedModel) -> None:
    changed.model.norm.register_forward_hook(lambda module, args, output: output * 2)


def unknown_member(changed: PreTrainedModel) -> None:
    changed.model.norm.factor = object()


@pytest.mark.parametrize(
    "change, why",
    [
        (own_module, "OwnNorm.forward is code of"),
        (own_forward, "norm.forward is bound"),
        (hook, "model.norm has hooks"),
        (unknown_member, "norm.factor is a object"),
    ],
)
def test_what_cannot_be_told_has_none(change, why):
    changed = model()
    change(changed)
    with pytest.raises(CannotTell, match=why):
        fingerprint(changed)


def wrapped(function):
    """A function that only its code tells from the one that it wraps."""
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs))


@pytest.mark.parametrize(
    "owner, name",
    [
        (modeling_llama.LlamaMLP, "forward"),
        (modeling_llama.LlamaMLP, "__call__"),
        (modeling_llama, "apply_rotary_pos_emb"),
        (modeling_llama, "create_causal_mask"),
        (modeling_llama, "eager_attention_forward"),
        (masking_utils, "causal_mask_function"),
    ],
)
def test_a_model_whose_librarys_code_was_replaced_has_none(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, wrapped(getattr(owner, name)))
    with pytest.raises(CannotTell, match="is code of"):
        fingerprint(model())


def test_a_class_of_the_same_name_is_another():
    changed = model()
    original = type(changed.model.norm)
    changed.model.norm.__class__ = type(original.__name__, (original,), {"__module__": original.__module__})
    with pytest.raises(CannotTell, match="is not the class of that name"):
        fingerprint(changed)


def test_hooks_on_all_modules_are_seen():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(CannotTell, match="hooks on all modules"):
            fingerprint(model())
    finally:
        handle.remove()
