"""Models that cannot be served right are refused, by op and module; odd ones that can are compiled right.

Never silently wrong: a model here either raises before an engine exists, or its tokens are the model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from broken import (
    BatchNormMLP,
    ConvMLP,
    CountingMLP,
    HandAttention,
    MasksPadding,
    RunningMeanMLP,
    causal,
    distances,
    llama_with,
)
from serving import assert_served_alike, pages_for, with_cache
from tiny import build, greedy_references
from torch import fx, nn

import chunkc
from chunkc.errors import UnsupportedModelError, VerificationError
from chunkc.passes.base import GraphPass, PassContext, PassReport


def compile_eager(model: nn.Module, **options: object) -> chunkc.Engine:
    return chunkc.compile(model, mode="eager", num_pages=8, **options)


def refusal(model: object, **options: object) -> UnsupportedModelError:
    with pytest.raises(UnsupportedModelError) as caught:
        compile_eager(model, **options)
    return caught.value


def attention(mask: Callable[[int], torch.Tensor | None], **options: object) -> Callable[[], nn.Module]:
    return lambda: llama_with("self_attn", HandAttention(mask, **options))


def mlp(module: type[nn.Module], **options: object) -> Callable[[], nn.Module]:
    return lambda: llama_with("mlp", module(**options))


@dataclass(frozen=True)
class Refusal:
    """A model, and what the error must say: the reason, and where given, part of the op's name and the module."""

    make: Callable[[], nn.Module]
    reason: str
    op: str | None = None
    module: str | None = None
    slow: bool = False


def buckets(distance: torch.Tensor) -> torch.Tensor:
    """As T5 does: near distances one by one, farther ones by their logarithm."""
    return torch.where(distance < 8, distance, 8 + ((distance.clamp(min=8) / 8).log() * 4).int())


def by_key(scores: torch.Tensor) -> torch.Tensor:
    """float32 [4, 1, S]: minus each key's position times a slope of each head."""
    slopes = torch.tensor([1.0, 0.5, 0.3, -0.2])
    return slopes[:, None, None] * -torch.arange(scores.shape[-1])


ATTENTION = "model.layers.0.self_attn"
REFUSED = {
    "a convolution over tokens": Refusal(mlp(ConvMLP), "mixes tokens", "conv1d", "model.layers.0.mlp.conv"),
    "a running mean over tokens": Refusal(mlp(RunningMeanMLP), "not token parallel", "cumsum", "model.layers.0.mlp"),
    "batch norm by the batch's statistics": Refusal(
        mlp(BatchNormMLP, of_the_batch=True), "statistics of the whole batch", "batch_norm", "model.layers.0.mlp.norm"
    ),
    "a state of its own": Refusal(mlp(CountingMLP), "writes into one of its inputs", "copy_"),
    "no mask": Refusal(attention(lambda size: None), "without a causal mask", "matmul", ATTENTION),
    "no mask, sdpa": Refusal(
        attention(lambda size: None, sdpa=True), "without a causal mask", "attention", ATTENTION, slow=True
    ),
    "a prefix that all see": Refusal(
        attention(lambda size: causal(size) | (torch.arange(size) < 4)), "see later tokens", "", ATTENTION
    ),
    "one later token, far out": Refusal(
        attention(lambda size: causal(size) | (distances(size) == -200)), "see later tokens", "", ATTENTION, slow=True
    ),
    "every other token": Refusal(
        attention(lambda size: causal(size) & (distances(size) % 2 == 0)), "neither causal", "", ATTENTION
    ),
    "a window that grows": Refusal(
        attention(lambda size: causal(size) & (distances(size) <= size // 2), sdpa=True),
        "how long the sequence is",
        "",
        ATTENTION,
        slow=True,
    ),
    "a bias by the root of the distance": Refusal(
        attention(lambda size: torch.where(causal(size), distances(size).clamp(0).sqrt() * -0.1, float("-inf"))),
        "not linear in the distance",
        "",
        ATTENTION,
    ),
    "a bias by distance, in buckets": Refusal(
        attention(lambda size: torch.where(causal(size), buckets(distances(size)) * -0.1, float("-inf")), sdpa=True),
        "not linear in the distance",
        "",
        ATTENTION,
        slow=True,
    ),
    "a bias by distance without a mask": Refusal(
        attention(lambda size: distances(size).abs() * -0.1), "without a causal mask", "matmul", ATTENTION, slow=True
    ),
    "clamped scores": Refusal(
        attention(causal, steps=lambda scores: scores.clamp(-1, 1)), "known steps", "softmax", ATTENTION, slow=True
    ),
    "a mask by token": Refusal(MasksPadding, "depends on which tokens the prompt holds", "", ""),
    "alibi rounded to bfloat16 in float32": Refusal(
        lambda: build("falcon_alibi", max_position_embeddings=2048), "not linear in the distance", "", "transformer"
    ),
    "a state space model": Refusal(lambda: build("mamba"), "could not capture the model"),
}


def cases(table: dict[str, Any], slow: Collection[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in slow else ()) for name in table]


@pytest.mark.parametrize("name", cases(REFUSED, [name for name, case in REFUSED.items() if case.slow]))
def test_is_refused(name):
    case = REFUSED[name]
    error = refusal(case.make())
    assert case.reason in error.reason
    assert "\n" not in str(error) and len(str(error)) < 500
    assert not isinstance(error, VerificationError)
    if case.op is not None:
        assert case.op in error.op and error.op in str(error)
    if case.module is not None:
        assert error.module == case.module and case.module in str(error)


COMPILED = {
    "batch norm by running statistics": mlp(BatchNormMLP, of_the_batch=False),
    "an odd scale": attention(causal, scale=0.337),
    "an odd scale, sdpa": attention(causal, scale=0.337, sdpa=True),
    "a bias by distance": attention(
        lambda size: torch.where(causal(size), distances(size) * -0.1 + 7.0, float("-inf"))
    ),
    "a bias by distance, in three steps": attention(causal, steps=lambda scores: scores - by_key(scores) * 0.3),
    "a bias by distance, sdpa": attention(
        lambda size: torch.where(causal(size), distances(size) * -0.1, float("-inf")), sdpa=True
    ),
    "an additive mask": attention(lambda size: torch.full((size, size), float("-inf")).triu(1), scale=0.5),
    "a window": attention(lambda size: causal(size) & (distances(size) < 5), scale=0.4),
    "chunks": attention(lambda size: causal(size) & (distances(size) <= torch.arange(size)[:, None] % 5), sdpa=True),
    "a softcap": attention(causal, scale=0.8, steps=lambda scores: torch.tanh(scores / 1.7) * 1.7),
}


@pytest.mark.parametrize(
    "name", cases(COMPILED, ["an odd scale, sdpa", "an additive mask", "chunks", "a bias by distance, sdpa"])
)
def test_is_compiled_right(name):
    model = COMPILED[name]()
    # the exchanged attention has no cache for generate to use
    references = greedy_references(model, (1, 2, 9, 33, 60), 8, use_cache=False)
    engine = with_cache(compile_eager(model), budget=7, page_size=4, num_pages=pages_for(references, 4))
    assert_served_alike(engine, references)


@pytest.mark.parametrize("thing", [3, None, {"model": 1}, [nn.Linear(2, 2)]])
def test_what_is_not_a_model_is_told(thing):
    assert f"model is a {type(thing).__name__}" in refusal(thing).reason


def test_a_model_elsewhere_is_told_to_come():
    error = refusal(build("llama").to("meta"))
    assert "on meta" in error.reason and "model.to('cpu')" in error.hint


def test_quantised_weights_are_told():
    model = build("llama")
    model.is_quantized = True
    assert "quantised" in refusal(model).reason


def test_a_dtype_that_is_not_served_is_told():
    assert "parameters are float64" in refusal(build("llama").double()).reason


def test_a_module_that_is_no_language_model_is_told():
    refusal(nn.Linear(3, 3))
    refusal(nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50)))


@dataclass(frozen=True)
class ScaleAWeight(GraphPass):
    """What a pass must not do: the output projection of one layer comes out a little larger."""

    name = "scale_a_weight"
    requires = ("attention_recognized",)
    before = ("fuse_linears",)
    expects_matches = True

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        graph = graph_module.graph
        weights = [node for node in graph.nodes if node.op == "get_attr" and "layers.1.self_attn.o_proj" in node.target]
        for weight in weights:
            with graph.inserting_after(weight):
                larger = graph.call_function(torch.ops.aten.mul.Tensor, (weight, 1.02))
            weight.replace_all_uses_with(larger, delete_user_cb=lambda user, larger=larger: user is not larger)
        return PassReport(matches=len(weights))


def test_a_pass_that_breaks_the_graph_is_caught_by_the_check():
    model = build("llama")
    error = refusal(model, passes=[ScaleAWeight()])
    assert isinstance(error, VerificationError)
    assert error.module == "model.layers.1.self_attn.o_proj"
    assert "differ from the model's" in error.reason


def test_without_the_check_such_a_pass_goes_through():
    engine = compile_eager(build("llama"), passes=[ScaleAWeight()], verify="off")
    assert "not checked" in engine.explain() and "scale_a_weight" in engine.explain()
    (completion,) = engine.generate([5, 6, 7], chunkc.SamplingParams(max_new_tokens=3))
    assert len(completion.token_ids) == 3
