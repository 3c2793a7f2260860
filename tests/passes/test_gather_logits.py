"""gather_logits: what comes after the last attention runs on the wanted rows, and gives those rows of all logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401  (defines grouped_mm_fallback)
from torch import fx, nn

from chunkc import compat
from chunkc.errors import PassError, UnsupportedModelError
from chunkc.passes.base import PassContext, PassReport
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import aten, is_call, output_node, placeholders, symbol_of, value
from chunkc.passes.gather_logits import GatherLogits, check_logits_gathered

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

LONGEST = 64
EXPERTS = 3


def _attend(at: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    return x + F.scaled_dot_product_attention(*(linear(x)[:, None] for linear in at.qkv), is_causal=True)[:, 0]


def _experts(at: SimpleNamespace, x: torch.Tensor, routed: torch.Tensor) -> torch.Tensor:
    """The best expert of each token; ``routed`` decides which, so that routing may start before attention."""
    ids = at.router(routed)[0].argmax(-1)
    numbers, order = ids.sort()
    ends = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
    rows = torch.ops.transformers.grouped_mm_fallback(x[0][order], at.experts, ends)
    return x + rows[order.argsort()][None]


def _sizes(at: SimpleNamespace) -> torch.Tensor:
    """Shapes made of the number of tokens, behind attention."""
    x = _attend(at, at.x)
    size = x.shape[1]
    halves = x.view(1, 2 * size, WIDTH // 2).softmax(-1).view(1, size, 2, -1).flatten(2)
    return halves * torch.ones(1, size, 1) + torch.full((size, WIDTH), 0.5)


def _own_entry(at: SimpleNamespace) -> torch.Tensor:
    x = _attend(at, at.x)
    return x * x[0][torch.arange(x.shape[1]), at.ids[0] % WIDTH][None, :, None]


def _parallel(at: SimpleNamespace) -> torch.Tensor:
    """Two attentions beside each other: the first's result is only used behind the last."""
    first = _attend(at, at.x)
    return first.tanh() * _attend(at, at.x.exp())


def _two_layers(at: SimpleNamespace) -> torch.Tensor:
    x = _attend(at, at.x)
    x = x + at.down(at.up(x).relu())
    x = _attend(at, x)
    return x + at.down(at.up(x).relu())


CASES = {
    "only_attention": lambda at: F.scaled_dot_product_attention(*(f(at.x)[:, None] for f in at.qkv), is_causal=True)[
        :, 0
    ],
    "residual": lambda at: at.x + at.down(_attend(at, at.x)),
    "two_layers": _two_layers,
    "parallel": _parallel,
    "sizes": _sizes,
    "own_entry": _own_entry,
    "positions": lambda at: _attend(at, at.x) + at.table[torch.arange(at.x.shape[1])],
    "positions_given": lambda at: _attend(at, at.x) + at.table[at.positions],
    "ids_again": lambda at: _attend(at, at.x) * at.table[at.ids],
    "from_before": lambda at: _attend(at, at.x) + at.x.exp().cumsum(-1),
    "experts": lambda at: (lambda x: _experts(at, x, x))(_attend(at, at.x)),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    members = {
        "qkv": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        "up": nn.Linear(WIDTH, 20),
        "down": nn.Linear(20, WIDTH),
        "router": nn.Linear(WIDTH, EXPERTS),
        "experts": nn.Parameter(drawn(EXPERTS, WIDTH, WIDTH)),
        "table": nn.Parameter(drawn(LONGEST, WIDTH)),
    }
    cases = {**CASES, "residual": lambda at: at.x + at.down(at.up(_attend(at, at.x)))}
    cases["routing_from_before"] = lambda at: _experts(at, _attend(at, at.x), at.x)
    cases["two_rows_a_token"] = lambda at: (_attend(at, at.x).view(1, -1, 6) + at.x.view(1, -1, 6).softmax(-1)).view(
        1, -1, WIDTH
    )
    return Captured(Cases(cases, **members))


def _gathered(graph_module: fx.GraphModule) -> PassContext:
    return run_passes(graph_module, stop_after="gather_logits", max_positions=LONGEST)


ROWS = {
    "all": range(14),
    "last_of_each": (4, 13),
    "one": (7,),
    "out_of_order": (13, 0, 5),
    "twice": (3, 3, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_wanted_rows_are_those_of_all_logits(captured: Captured, name: str) -> None:
    """In a batch of a decode and a prefill of two requests, neither at the start of its prompt."""
    graph_module = captured.graph(name)
    context = _gathered(graph_module)
    prompts = [tokens(9), tokens(16, 1)]
    expected = torch.cat([captured.logits(name, prompts[0])[4:9], captured.logits(name, prompts[1])[7:16]])
    for rows in ROWS.values():
        batches = Batches(graph_module, context, prompts)
        batches.step((1, 0, 7), (0, 0, 4), rows=torch.tensor([10]))
        wanted = torch.tensor(rows, dtype=torch.int64)
        logits = batches.step((0, 4, 9), (1, 7, 16), rows=wanted)
        torch.testing.assert_close(logits, expected[wanted], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_nothing_behind_attention_runs_on_all_rows(captured: Captured, name: str) -> None:
    graph_module = captured.graph(name)
    _gathered(graph_module)
    graph = graph_module.graph
    all_rows = symbol_of(value(placeholders(graph)["input_ids"]).shape[0])
    wanted = symbol_of(value(placeholders(graph)["logits_rows"]).shape[0])
    assert all_rows != wanted
    last = [node for node in graph.nodes if is_call(node, torch.ops.chunkc.mixed_attention)][-1]
    behind = {last}
    for node in graph.nodes:
        if node.op != "output" and behind & set(node.all_input_nodes):
            behind.add(node)
    sizes = [symbol_of(s) for node in behind - {last} for s in getattr(value(node), "shape", ()) if symbol_of(s)]
    assert sizes and all(size.free_symbols == {wanted} for size in sizes)
    assert output_node(graph) in behind


@pytest.mark.parametrize("name", CASES)
def test_op_counts(captured: Captured, name: str) -> None:
    """One gather per value that crosses, no more; nothing else changes."""
    before, after = captured.graph(name), captured.graph(name)
    run_passes(before, stop_after="page_attention", max_positions=LONGEST)
    _gathered(after)
    added = count_ops(after) - count_ops(before)
    assert set(added) <= {
        "aten.index_select",
        "aten.sym_size",
        "aten.arange",
        "aten.ones",
        "aten.full",
        "operator.mul",
    } | {op for op in added if not op.startswith(("aten.", "chunkc."))}
    gathers = [node.args[0] for node in after.graph.nodes if is_call(node, aten.index_select)]
    assert len(gathers) == len(set(gathers)) == added["aten.index_select"] > 0


def test_only_the_last_layer_is_gathered(captured: Captured) -> None:
    graph_module = captured.graph("two_layers")
    _gathered(graph_module)
    rows = [str(value(node).shape[1]) for node in graph_module.graph.nodes if is_call(node, aten.linear)]
    # q, k and v of both layers, up and down of the first on all rows; up and down of the second on the wanted
    assert len(rows) == 10 and len(set(rows[:8])) == 1 and len(set(rows[8:])) == 1 and rows[0] != rows[-1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("routing_from_before", "routing that starts before the last attention"),
        ("two_rows_a_token", "rows are not one a token"),
    ],
)
def test_what_cannot_be_gathered_is_refused(captured: Captured, name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        _gathered(captured.graph(name))
    assert caught.value.op is not None and caught.value.module == name


@pytest.mark.parametrize("name", ["mixtral", "gemma2"])
def test_real_models(name: str) -> None:
    """Mixtral's last layer routes the wanted rows only; Gemma 2 caps its logits."""
    model, graph_module = huggingface(name)
    context = run_passes(graph_module, stop_after="gather_logits", max_positions=256)
    prompts = [tokens(12, vocab=211), tokens(17, 1, vocab=211)]
    expected = torch.cat([reference_logits(model, prompts[0])[5:12], reference_logits(model, prompts[1])[:9]])
    for rows in (torch.arange(16), torch.tensor([6, 15]), torch.tensor([2])):
        batches = Batches(graph_module, context, prompts)
        batches.step((0, 0, 5), rows=torch.tensor([4]))
        logits = batches.step((0, 5, 12), (1, 0, 9), rows=rows)
        torch.testing.assert_close(logits, expected[rows], atol=1e-4, rtol=1e-4)


def test_without_attention_nothing_matches() -> None:
    graph_module = Captured(Cases({"plain": lambda at: at.x * 2})).graph("plain")
    report: PassReport = run_pass(GatherLogits(), graph_module)
    assert report.matches == 0 and "logits_rows" not in placeholders(graph_module.graph)


def test_the_fact_is_checked(captured: Captured) -> None:
    graph_module = captured.graph("residual")
    context = run_passes(graph_module, stop_after="page_attention", max_positions=LONGEST)
    with pytest.raises(PassError, match="no input logits_rows"):
        check_logits_gathered(graph_module, context)
    graph_module = captured.graph("residual")
    context = _gathered(graph_module)
    check_logits_gathered(graph_module, context)
    with compat.one_graph_for_every_size():
        graph_module.graph.output_node().args = (placeholders(graph_module.graph)["page_table"],)
        with pytest.raises(PassError, match="the logits have shape"):
            check_logits_gathered(graph_module, context)


def test_runs_on_one_prompt(captured: Captured) -> None:
    graph_module = captured.graph("two_layers")
    _gathered(graph_module)
    ids = tokens(21)
    torch.testing.assert_close(
        run_on_prompt(graph_module, ids), captured.logits("two_layers", ids), atol=1e-5, rtol=1e-5
    )
