"""page_attention: keys and values go to each call's own pages; packed and chunked batches compute the same."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from chunkc.errors import PassError
from chunkc.passes.base import PassContext
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import aten, is_call, placeholders, value
from chunkc.passes.page_attention import PageAttention, check_paged

from .graphs import (
    PAGE_SIZE,
    WIDTH,
    Batches,
    Captured,
    Cases,
    count_ops,
    huggingface,
    reference_logits,
    run_pass,
    run_passes,
    serve,
    tokens,
)

LONGEST = 64


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[1, S, H * D] to [1, H, S, D]."""
    return x.view(1, x.shape[1], heads, -1).transpose(1, 2)


def _attend(at: SimpleNamespace, x: torch.Tensor, number: int = 0, **mask: int) -> torch.Tensor:
    """x [1, S, 12] plus causal attention of 4 query heads and 2 key heads, by linears of this number."""
    q, k, v = _heads(at.to_q[number](x), 4), _heads(at.to_k[number](x), 2), _heads(at.to_v[number](x), 2)
    if mask:
        row = torch.arange(x.shape[1])
        distance = row[:, None] - row[None, :]
        allowed = (distance >= 0) & (distance < mask["window"])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return x + out.transpose(1, 2).reshape(x.shape)


def _with_sinks(at: SimpleNamespace) -> torch.Tensor:
    """As the attention interface captures it, with a logit per head that takes part in the softmax."""
    q, k, v = _heads(at.to_q[0](at.x), 4), _heads(at.to_k[0](at.x), 2), _heads(at.to_v[0](at.x), 2)
    out = torch.ops.chunkc.attention(q, k, v, None, at.sinks, None, 0.37, True, 0, 0, 2.0)
    return at.x + out.reshape(at.x.shape)


def _with_slopes(at: SimpleNamespace) -> torch.Tensor:
    """Two layers, the second with other slopes."""
    x, size = at.x, at.ids.shape[1]
    for number, factor in enumerate((1.0, -0.3)):
        q, k, v = (_heads(linears[number](x), n) for linears, n in ((at.to_q, 4), (at.to_k, 2), (at.to_v, 2)))
        distance = torch.arange(size) - torch.arange(size)[:, None]
        mask = (at.slopes * factor * distance).masked_fill(distance > 0, -torch.inf)
        x = x + F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).reshape(x.shape)
    return x


def _narrow_values(at: SimpleNamespace) -> torch.Tensor:
    """Queries and keys of 3, values of 2; keys come permuted, not transposed."""
    q, k = _heads(at.to_q[0](at.x), 4), at.to_k[0](at.x).view(1, -1, 2, 3).permute(0, 2, 1, 3)
    out = F.scaled_dot_product_attention(q, k, _heads(at.to_v[0](at.x), 2)[..., 1:], is_causal=True, enable_gqa=True)
    return at.x + torch.cat([out, out], -1)[..., :3].transpose(1, 2).reshape(at.x.shape)


def _single_head(at: SimpleNamespace) -> torch.Tensor:
    """[1, S, D]: what is not yet split into heads."""
    return at.x + F.scaled_dot_product_attention(*(linear(at.x) for linear in at.to_q), is_causal=True)


CASES = {
    "one": lambda at: _attend(at, at.x),
    "two": lambda at: _attend(at, _attend(at, at.x), 1),
    "same_weights": lambda at: _attend(at, _attend(at, at.x)),
    "windows": lambda at: _attend(at, _attend(at, _attend(at, at.x, window=3), 1), 1, window=3),
    "sinks": _with_sinks,
    "slopes": _with_slopes,
    "narrow_values": _narrow_values,
    "single_head": _single_head,
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    linears = {"to_q": WIDTH, "to_k": WIDTH // 2, "to_v": WIDTH // 2}
    members = {name: nn.ModuleList(nn.Linear(WIDTH, width) for _ in range(2)) for name, width in linears.items()}
    members["to_q"].append(nn.Linear(WIDTH, WIDTH))
    slopes = torch.tensor([0.5, 0.25, 0.7, 1.5])[:, None, None]
    return Captured(Cases(CASES, **members, sinks=nn.Parameter(torch.zeros(4)), slopes=slopes))


def _paged(captured: Captured, name: str) -> tuple[fx.GraphModule, PassContext]:
    graph_module = captured.graph(name)
    return graph_module, run_passes(graph_module, stop_after="page_attention", max_positions=LONGEST)


@pytest.mark.parametrize("name", CASES)
def test_batches_compute_what_the_module_does(captured: Captured, name: str) -> None:
    serve(captured, name, lengths=(19, 7, 1), max_positions=LONGEST)


@pytest.mark.parametrize("name", CASES)
def test_op_counts_and_numbers(captured: Captured, name: str) -> None:
    before = captured.graph(name)
    run_passes(before, stop_after="fuse_linears", max_positions=LONGEST)
    graph_module, context = _paged(captured, name)
    calls = count_ops(before)["chunkc.attention"]
    counts = count_ops(graph_module)
    assert (counts["chunkc.attention"], counts["chunkc.mixed_attention"]) == (0, calls)
    assert [layer.index for layer in context.attention_layers] == list(range(calls))
    ids = tokens(21)
    for page_size in (1, 4, 32):
        logits = run_on_prompt(graph_module, ids, page_size=page_size)
        torch.testing.assert_close(logits, captured.logits(name, ids), atol=1e-5, rtol=1e-5)


def test_inputs_of_the_paged_graph(captured: Captured) -> None:
    graph_module, context = _paged(captured, "narrow_values")
    inputs = {name: value(node) for name, node in placeholders(graph_module.graph).items()}
    metadata = ["q_offsets", "kv_lens", "page_table", "slot_mapping"]
    assert list(inputs) == [
        *("input_ids", "positions", *metadata),
        *("tasks_0", "merges_0", "k_pages_0", "v_pages_0"),
    ]
    assert inputs["k_pages_0"].shape[1] == 2 and inputs["k_pages_0"].shape[3] == 3
    assert inputs["v_pages_0"].shape[1] == 2 and inputs["v_pages_0"].shape[3] == 2
    assert inputs["k_pages_0"].dtype == torch.float32 and inputs["tasks_0"].dtype == torch.int32
    (layer,) = context.attention_layers
    assert (layer.shape.num_q_heads, layer.shape.num_kv_heads) == (4, 2)
    assert (layer.shape.qk_dim, layer.shape.v_dim, layer.dtype) == (3, 2, torch.float32)


@pytest.mark.parametrize("name", ["two", "same_weights"])
def test_each_call_has_pages_of_its_own(captured: Captured, name: str) -> None:
    graph_module, _ = _paged(captured, name)
    mixed = [node for node in graph_module.graph.nodes if is_call(node, torch.ops.chunkc.mixed_attention)]
    pages = [node.args[3:5] for node in mixed]
    assert len({page for pair in pages for page in pair}) == 4
    batches = Batches(graph_module, _paged(captured, name)[1], [tokens(11)])
    batches.step((0, 0, 11))
    assert not torch.allclose(batches.pages["k_pages_0"], batches.pages["k_pages_1"], equal_nan=True)


def test_pages_hold_keys_and_values(captured: Captured) -> None:
    """At the slots given, for every request; nothing is written elsewhere."""
    graph_module, context = _paged(captured, "one")
    prompts = [tokens(9), tokens(6, 1)]
    batches = Batches(graph_module, context, prompts)
    batches.step((0, 0, 5))
    batches.step((1, 0, 6), (0, 5, 9))
    written = torch.zeros(len(batches.pages["k_pages_0"]) * PAGE_SIZE, dtype=torch.bool)
    for request, prompt in enumerate(prompts):
        slots = batches.slots(request, 0, len(prompt))
        written[slots] = True
        for kind, linears in (("k", captured.cases.to_k), ("v", captured.cases.to_v)):
            pages = batches.pages[f"{kind}_pages_0"]
            with torch.no_grad():
                expected = linears[0](captured.cases.embed(prompt)).view(-1, 2, 3)
            found = pages.transpose(1, 2).reshape(-1, 2, 3)[slots]
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for pages in batches.pages.values():
        flat = pages.transpose(1, 2).flatten(0, 1)
        assert flat[~written].isnan().all() and not flat[written].isnan().any()


def test_calls_of_one_kind_share_a_task_table(captured: Captured) -> None:
    assert {layer.plan for layer in _paged(captured, "two")[1].attention_layers} == {0}
    layers = _paged(captured, "windows")[1].attention_layers
    assert [layer.plan for layer in layers] == [0, 1, 0]
    assert [layer.shape.window for layer in layers] == [3, 0, 3]


def test_slopes_are_each_calls_own_and_share_a_task_table(captured: Captured) -> None:
    graph_module, context = _paged(captured, "slopes")
    assert {layer.plan for layer in context.attention_layers} == {0}
    first, second = (getattr(graph_module, node.args[12].target) for node in _mixed(graph_module.graph))
    torch.testing.assert_close(first, torch.tensor([0.5, 0.25, 0.7, 1.5]), rtol=0, atol=0)
    torch.testing.assert_close(second, first * -0.3, rtol=1e-6, atol=0)


def test_window_and_full_layers_of_a_real_model() -> None:
    """Gemma 2: a window in every second layer, softcap, an odd scale; chunks of several requests."""
    model, graph_module = huggingface("gemma2")
    context = run_passes(graph_module, stop_after="page_attention", max_positions=256)
    first, second = context.attention_layers
    assert (first.shape.window, second.shape.window) == (model.config.sliding_window, 0)
    assert {first.plan, second.plan} == {0, 1}
    prompts = [tokens(23, vocab=211), tokens(9, 1, vocab=211)]
    for prompt, logits in zip(prompts, Batches(graph_module, context, prompts).whole_prompts(), strict=True):
        torch.testing.assert_close(logits, reference_logits(model, prompt), atol=1e-4, rtol=1e-4)


def test_without_attention_nothing_matches() -> None:
    graph_module = Captured(Cases({"plain": lambda at: at.x * 2})).graph("plain")
    assert run_pass(PageAttention(), graph_module).matches == 0
    assert list(placeholders(graph_module.graph)) == ["input_ids", "position_ids"]


def _mixed(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if is_call(node, torch.ops.chunkc.mixed_attention)]


def _share(graph: fx.Graph, context: PassContext) -> None:
    first, second = _mixed(graph)
    second.args = (*second.args[:3], first.args[3], *second.args[4:])


def _stack(graph: fx.Graph, context: PassContext) -> None:
    node = _mixed(graph)[0]
    with graph.inserting_before(node):
        part = graph.call_function(aten.slice.Tensor, (node.args[3], 0, 0, 1))
    node.args = (*node.args[:3], part, *node.args[4:])


def _read(graph: fx.Graph, context: PassContext) -> None:
    node = _mixed(graph)[0]
    with graph.inserting_before(node):
        graph.call_function(aten.neg.default, (node.args[3],))


def _forget(graph: fx.Graph, context: PassContext) -> None:
    context.attention_layers.pop()


def _unpage(graph: fx.Graph, context: PassContext) -> None:
    node = _mixed(graph)[0]
    q = node.args[0]
    with graph.inserting_before(node):
        graph.call_function(torch.ops.chunkc.attention.default, (q, q, q, None, None, None, 1.0, True, 0, 0, 0.0))


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (_share, "shares its pages|more than its attention"),
        (_stack, "not a graph input"),
        (_read, "used by more than its attention"),
        (_forget, "list of layers differ"),
        (_unpage, "is not paged"),
    ],
)
def test_the_fact_is_checked(captured: Captured, harm: Callable[[fx.Graph, PassContext], None], reason: str) -> None:
    graph_module, context = _paged(captured, "two")
    check_paged(graph_module, context)
    harm(graph_module.graph, context)
    with pytest.raises(PassError, match=reason):
        check_paged(graph_module, context)
