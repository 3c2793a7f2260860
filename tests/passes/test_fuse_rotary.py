"""fuse_rotary: the rotation of Llama and its like goes into the attention, and nothing that only looks like it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from chunkc import compat
from chunkc.errors import ChunkcError, PassError
from chunkc.inductor import begin_libraries
from chunkc.kernels import cpu_backend
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.parts import cut
from chunkc.passes.base import PassContext, PassReport
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.facts import check_fact
from chunkc.passes.fuse_rotary import FuseRotary, check_rotary_fused
from chunkc.passes.fx_tools import aten, is_call, value
from chunkc.passes.propagate import propagate
from chunkc.rewriting import rewrite

from .graphs import (
    WIDTH,
    Batches,
    Captured,
    Cases,
    count_ops,
    drawn,
    huggingface,
    reference_logits,
    run_pass,
    run_passes,
    tokens,
)

DIM = 6
LONGEST = 64


def prepare(at: SimpleNamespace) -> None:
    """Angles, cosines and sines [1, S, DIM], as models make them once; q, k, v [1, H, S, DIM]."""
    frequencies = at.positions[..., None].float() * at.inverse_frequencies
    at.angles = torch.cat([frequencies, frequencies], -1)
    at.cos, at.sin = at.angles.cos() * 1.0, at.angles.sin() * 1.0
    at.q, at.k, at.v = heads(at.to_q(at.x), 4), heads(at.to_k(at.x), 2), heads(at.to_v(at.x), 2)


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """[1, S, H * D] to [1, H, S, D]."""
    return x.view(1, x.shape[1], count, -1).transpose(1, 2)


def half_turn(x: torch.Tensor) -> torch.Tensor:
    size = x.shape[-1]
    return torch.cat((-x[..., size // 2 :], x[..., : size // 2]), -1)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As Llama writes it."""
    return x * cos.unsqueeze(1) + half_turn(x) * sin.unsqueeze(1)


def attend(at: SimpleNamespace, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None = None) -> torch.Tensor:
    out = F.scaled_dot_product_attention(q, k, at.v if v is None else v, is_causal=True, enable_gqa=True)
    return at.x + at.out(out.transpose(1, 2).reshape(1, at.x.shape[1], -1))


def both(function: Callable[..., torch.Tensor]) -> Callable[[SimpleNamespace], torch.Tensor]:
    """Queries and keys changed by a function of x [1, H, S, D], cos and sin [1, S, D]."""
    return lambda at: attend(at, function(at.q, at.cos, at.sin), function(at.k, at.cos, at.sin))


def partial(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first 4 of 6 elements, as Phi and GPT-NeoX do."""
    return torch.cat((turn(x[..., :4], cos[..., 1:5], sin[..., 1:5]), x[..., 4:]), -1)


def heads_behind(at: SimpleNamespace) -> torch.Tensor:
    """Rotated as [1, S, H, D], before the transpose."""
    cos, sin = at.cos.unsqueeze(2), at.sin.unsqueeze(2)
    q, k = (x.transpose(1, 2) for x in (at.q, at.k))
    q, k = (x * cos + half_turn(x) * sin for x in (q, k))
    return attend(at, q.transpose(1, 2), k.transpose(1, 2))


def two_layers(at: SimpleNamespace) -> torch.Tensor:
    x = attend(at, turn(at.q, at.cos, at.sin), turn(at.k, at.cos, at.sin))
    q, k, v = heads(at.to_q(x), 4), heads(at.to_k(x), 2), heads(at.to_v(x), 2)
    return x + attend(at, turn(q, at.cos, at.sin), turn(k, at.cos, at.sin), v)


def normed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As Qwen 3 and Gemma 3 do: each head is normed first."""
    return turn(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), cos, sin)


def from_the_end(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Halves by bounds that count from the end."""
    return x * cos[:, None] + torch.cat([-x[..., -3:], x[..., :-3]], 3) * sin[:, None]


def tables_of_the_layer(at: SimpleNamespace) -> torch.Tensor:
    """Sines that depend on more than positions; they are per token all the same."""
    sin = at.to_k(at.x)[..., :DIM]
    return attend(at, turn(at.q, at.cos, sin), turn(at.k, at.cos, sin))


#: name: function, number of attentions
FUSED: dict[str, tuple[Callable[[SimpleNamespace], torch.Tensor], int]] = {
    "llama": (both(turn), 1),
    "sines_first": (both(lambda x, cos, sin: sin[:, None] * half_turn(x) + cos[:, None] * x), 1),
    "halves_that_differ": (both(lambda x, cos, sin: turn(x, cos + sin, sin * 2)), 1),
    "tables_not_unsqueezed": (both(lambda x, c, s: x * c.view(1, 1, -1, 6) + half_turn(x) * s.view(1, 1, -1, 6)), 1),
    "negative_bounds": (both(from_the_end), 1),
    "partial": (both(partial), 1),
    "nothing_behind": (both(lambda x, c, s: torch.cat((turn(x[..., :6], c, s), x[..., 6:]), -1)), 1),
    "heads_behind": (heads_behind, 1),
    "two_layers": (two_layers, 2),
    "normed": (both(normed), 1),
    "twice": (both(lambda x, cos, sin: turn(turn(x, cos, sin), cos, sin)), 1),
    "tables_of_the_layer": (tables_of_the_layer, 1),
}


def halves(first: Callable[..., torch.Tensor], second: Callable[..., torch.Tensor], size: int = 3):
    """x * cos + (two functions of x's parts, joined) * sin."""
    return both(
        lambda x, cos, sin: (
            x * cos[:, None]
            + torch.cat([first(x[..., :size], x[..., size:]), second(x[..., :size], x[..., size:])], -1) * sin[:, None]
        )
    )


def neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As GPT-J and Cohere do."""
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    return x * cos[:, None] + turned * sin[:, None]


ALONE = {
    "not_swapped": halves(lambda a, b: -a, lambda a, b: b),
    "no_sign": halves(lambda a, b: b, lambda a, b: a),
    "sign_on_the_other": halves(lambda a, b: b, lambda a, b: -a),
    "both_signs": halves(lambda a, b: -b, lambda a, b: -a),
    "one_half_twice": halves(lambda a, b: -b, lambda a, b: b),
    "other_sizes": halves(lambda a, b: -b, lambda a, b: a, size=2),
    "neighbours": both(neighbours),
    "along_the_heads": both(
        lambda x, c, s: x * c[:, None] + torch.cat([-x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]], 1) * s[:, None]
    ),
    "difference": both(lambda x, cos, sin: x * cos[:, None] - half_turn(x) * sin[:, None]),
    "weighted": both(lambda x, cos, sin: torch.add(x * cos[:, None], half_turn(x) * sin[:, None], alpha=2)),
    "of_something_else": both(lambda x, cos, sin: x * cos[:, None] + half_turn(x.tanh()) * sin[:, None]),
    "no_sine": both(lambda x, cos, sin: x * cos[:, None] + half_turn(x)),
    "changed_after": both(lambda x, cos, sin: turn(x, cos, sin) * 0.5),
    "queries_only": lambda at: attend(at, turn(at.q, at.cos, at.sin), at.k),
    "keys_only": lambda at: attend(at, at.q, turn(at.k, at.cos, at.sin)),
    "last_elements": both(lambda x, c, s: torch.cat((x[..., :2], turn(x[..., 2:], c[..., 1:5], s[..., 1:5])), -1)),
    "other_elements_behind": both(
        lambda x, c, s: torch.cat((turn(x[..., :4], c[..., 1:5], s[..., 1:5]), x[..., :2]), -1)
    ),
    "something_else_behind": both(
        lambda x, c, s: torch.cat((turn(x[..., :4], c[..., 1:5], s[..., 1:5]), x.tanh()[..., 4:]), -1)
    ),
    "middle_elements": both(lambda x, c, s: torch.cat((turn(x[..., 1:5], c[..., 1:5], s[..., 1:5]), x[..., 4:]), -1)),
}


def _read_elsewhere(at: SimpleNamespace) -> torch.Tensor:
    k = turn(at.k, at.cos, at.sin)
    return attend(at, turn(at.q, at.cos, at.sin), k) + k.transpose(1, 2).reshape(at.x.shape)


def _per_head(at: SimpleNamespace) -> torch.Tensor:
    """Four heads everywhere, each with angles of its own."""
    cos, sin = (torch.cat([table[:, None] * factor for factor in (1, 2, 3, 4)], 1) for table in (at.cos, at.sin))
    q, k = (x * cos + half_turn(x) * sin for x in (at.q, at.q.tanh()))
    return attend(at, q, k, at.q)


def _of_half(at: SimpleNamespace) -> torch.Tensor:
    return attend(at, turn(at.q.bfloat16(), at.cos, at.sin), turn(at.k.bfloat16(), at.cos, at.sin))


#: name: function, and why it is left alone
SAID = {
    "other_cosines": (
        lambda at: attend(at, turn(at.q, at.cos, at.sin), turn(at.k, at.cos * 2, at.sin)),
        "not rotated as its keys",
    ),
    "other_sines": (
        lambda at: attend(at, turn(at.q, at.cos, at.sin), turn(at.k, at.cos, -at.sin)),
        "not rotated as its keys",
    ),
    "exchanged": (
        lambda at: attend(at, turn(at.q, at.cos, at.sin), turn(at.k, at.sin, at.cos)),
        "not rotated as its keys",
    ),
    "other_sizes_of_queries": (
        lambda at: attend(at, partial(at.q, at.cos, at.sin), turn(at.k, at.cos, at.sin)),
        "not rotated as its keys",
    ),
    "read_elsewhere": (_read_elsewhere, "used elsewhere too"),
    "angles_per_head": (_per_head, "not one row a token"),
    "one_row_for_all": (
        lambda at: attend(at, *(x * at.row.cos() + half_turn(x) * at.row.sin() for x in (at.q, at.k))),
        "not one row a token",
    ),
    "one_cosine_a_token": (both(lambda x, cos, sin: turn(x, cos[..., :1], sin[..., :1])), "not one row a token"),
    "half_with_whole_tables": (_of_half, "not of the dtype"),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    assert cpu_backend.load()
    members = {
        "to_q": nn.Linear(WIDTH, 4 * DIM),
        "to_k": nn.Linear(WIDTH, 2 * DIM),
        "to_v": nn.Linear(WIDTH, 2 * DIM),
        "out": nn.Linear(4 * DIM, WIDTH),
        "inverse_frequencies": torch.tensor([1.0, 0.3, 0.05]),
        "row": drawn(1, 1, 1, DIM),
    }
    functions = {**{name: f for name, (f, _) in FUSED.items()}, **ALONE, **{name: f for name, (f, _) in SAID.items()}}
    return Captured(Cases(functions, prepare, **members))


def paged(captured: Captured, name: str) -> tuple[fx.GraphModule, PassContext]:
    graph_module = captured.graph(name)
    return graph_module, run_passes(graph_module, stop_after="page_attention", max_positions=LONGEST)


def fuse(captured: Captured, name: str) -> tuple[fx.GraphModule, PassContext, PassReport]:
    graph_module, context = paged(captured, name)
    return graph_module, context, run_pass(FuseRotary(), graph_module, context)


def attentions(graph_module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in graph_module.graph.nodes if is_call(node, torch.ops.chunkc.mixed_attention)]


@pytest.mark.parametrize("name", FUSED)
def test_fused(captured: Captured, name: str) -> None:
    """Not a bit is another, in float32, than before the pass."""
    graph_module, context, report = fuse(captured, name)
    assert report.matches == FUSED[name][1] and not report.skipped
    counts, ids = count_ops(graph_module), tokens(21)
    turns = 2 if name == "twice" else 0
    assert counts["aten.neg"] == turns and counts["aten.cat"] == turns + 1  # the angles'
    for node in attentions(graph_module):
        assert [value(table).shape[1] for table in node.args[17:]] == [4 if name == "partial" else DIM] * 2
    assert torch.equal(run_on_prompt(graph_module, ids), run_on_prompt(paged(captured, name)[0], ids))
    prompts = [tokens(19), tokens(7, 1)]
    for prompt, logits in zip(prompts, Batches(graph_module, context, prompts).whole_prompts(), strict=True):
        torch.testing.assert_close(logits, captured.logits(name, prompt), atol=2e-5, rtol=2e-5)
    check_rotary_fused(graph_module, context)
    check_fact("token_parallel", graph_module, context)


@pytest.mark.parametrize("name", [*ALONE, *SAID])
def test_left_alone(captured: Captured, name: str) -> None:
    graph_module, context, report = fuse(captured, name)
    assert report.matches == 0
    assert [skip.why for skip in report.skipped] == [] if name in ALONE else SAID[name][1] in report.skipped[0].why
    before, ids = paged(captured, name)[0], tokens(21)
    before.graph.eliminate_dead_code()
    assert count_ops(graph_module) == count_ops(before)
    assert torch.equal(run_on_prompt(graph_module, ids), run_on_prompt(before, ids))
    check_rotary_fused(graph_module, context)


def test_layers_share_their_tables(captured: Captured) -> None:
    first, second = attentions(fuse(captured, "two_layers")[0])
    assert first.args[17:] == second.args[17:]


def test_without_the_compiled_body_it_is_said(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_backend, "load", lambda dtype: False)
    graph_module, context, report = fuse(captured, "llama")
    assert report.matches == 0 and "no compiled body" in report.skipped[0].why
    check_rotary_fused(graph_module, context)


def test_the_fact_is_checked(captured: Captured) -> None:
    with pytest.raises(PassError, match="is rotated before it"):
        check_rotary_fused(*paged(captured, "llama"))


@pytest.mark.parametrize("place", [17, 18])
def test_tables_of_other_tokens_are_found_out(captured: Captured, place: int) -> None:
    """The analysis of tokens looks at cosines and sines too."""
    graph_module, context, _ = fuse(captured, "llama")
    (node,) = attentions(graph_module)
    with graph_module.graph.inserting_before(node):
        flipped = graph_module.graph.call_function(aten.flip.default, (node.args[place], [0]))
    node.args = (*node.args[:place], flipped, *node.args[place + 1 :])
    propagate(graph_module)
    with pytest.raises(ChunkcError):
        check_fact("token_parallel", graph_module, context)


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("llama", 2),
        ("qwen3", 2),
        ("gemma3_text", 2),
        ("phi", 2),  # a part of each head
        ("phi3", 2),
        ("gptj", 0),  # neighbours
        ("gpt_oss", 0),  # other operations
        ("gpt2", 0),
    ],
)
def test_models(name: str, matches: int) -> None:
    model, _ = huggingface(name)
    done = rewrite(model)
    assert {record.name: record.report.matches for record in done.records}["fuse_rotary"] == matches
    ids = tokens(13, vocab=model.config.vocab_size)
    expected = reference_logits(model, ids)
    torch.testing.assert_close(run_on_prompt(done.graph_module, ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(
    not can_pack(torch.float32) or active_body(torch.float32) != "own", reason="norms are not fused on this machine"
)
def test_a_layer_of_llama_is_nothing_but_calls_of_ours(tmp_path) -> None:
    """Between them there are views; Inductor makes no loop of its own."""
    parts = cut(rewrite(huggingface("llama")[0]).graph_module)
    layer = parts[1].graph_module
    counts = count_ops(layer)
    views = {f"aten.{name}" for name in ("reshape", "squeeze", "unsqueeze", "split_with_sizes", "sym_size")}
    assert counts["chunkc.mixed_attention"] == 1 and counts["chunkc.fused_linear"] >= 3
    loops = [
        node
        for node in layer.graph.nodes
        if node.op == "call_function"
        and node.target is not operator.getitem
        and str(node.target).rsplit(".", 1)[0] not in {*views, "chunkc.mixed_attention", "chunkc.fused_linear"}
    ]
    assert not loops
    with compat.one_graph_for_every_size():
        (wait,) = begin_libraries([layer], ["layer"], tmp_path)
    assert b"cpp_fused" not in wait().read_bytes()
