"""fuse_linears: linears of one input become one product with one weight; others and their weights stay."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from chunkc.errors import PassError
from chunkc.passes.base import PassContext, PassReport
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fuse_linears import FuseLinears, check_linears_fused

from .graphs import WIDTH, Captured, Cases, count_ops, drawn, run_pass, run_passes, serve, tokens


def _sum(*parts: torch.Tensor) -> torch.Tensor:
    """Parts of different widths, each weighted, so that a mix-up of parts shows."""
    total = parts[0][..., :8]
    for weight, part in enumerate(parts[1:], 2):
        total = total + weight * part[..., :8]
    return total


def _attention(at: SimpleNamespace) -> torch.Tensor:
    q, k, v = (linear(at.x)[:, None] for linear in (at.twelve, at.plain, at.other))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


#: name: (function, groups, linears afterwards)
FUSED = {
    "two": (lambda at: _sum(at.twelve(at.x), at.other(at.x)), 1, 1),
    "three_widths": (lambda at: _sum(at.twelve(at.x), at.eight(at.x), at.other(at.x)), 1, 1),
    "bias_on_some": (lambda at: _sum(at.plain(at.x), at.twelve(at.x), at.eight(at.x)), 1, 1),
    "no_bias": (lambda at: _sum(at.plain(at.x), at.plain_eight(at.x)), 1, 1),
    "gate_and_up": (lambda at: at.down(F.silu(at.twelve(at.x)) * at.other(at.x)), 1, 2),
    "two_groups": (
        lambda at: _sum(at.twelve(at.x), at.eight(at.x)) + _sum(at.other(at.x.exp()), at.plain_eight(at.x.exp())),
        2,
        2,
    ),
    "used_at_once": (lambda at: at.down(at.twelve(at.x)) + at.plain(at.x), 1, 2),
    "matmul_with_transposed": (lambda at: _sum(at.x @ at.square.T, at.eight(at.x)), 1, 1),
}
#: name: (function, linears afterwards, why they were left alone)
ALONE = {
    "one": (lambda at: at.twelve(at.x), 1, None),
    "other_inputs": (lambda at: at.twelve(at.x) + at.other(at.x.exp()), 2, None),
    "one_after_the_other": (lambda at: at.twelve(at.other(at.x)), 2, None),
    "tied": (
        lambda at: _sum(F.linear(at.x, at.head.weight), at.eight(at.x)) + at.head.weight.sum(),
        2,
        "used elsewhere",
    ),
    "used_twice": (
        lambda at: _sum(at.twelve(at.x), at.eight(at.x)) + at.twelve(at.x.exp())[..., :8],
        3,
        "used elsewhere",
    ),
    "computed": (lambda at: _sum(F.linear(at.x, at.square * 2), at.eight(at.x)), 2, "is computed"),
    "other_dtype": (lambda at: at.twelve(at.x) + at.brief(at.x.to(torch.bfloat16)).float(), 2, None),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {name: case[0] for name, case in {**FUSED, **ALONE}.items()}
    linears = {
        "twelve": nn.Linear(WIDTH, 12),
        "other": nn.Linear(WIDTH, 12),
        "down": nn.Linear(WIDTH, 12),
        "plain": nn.Linear(WIDTH, 12, bias=False),
        "eight": nn.Linear(WIDTH, 8),
        "plain_eight": nn.Linear(WIDTH, 8, bias=False),
        "head": nn.Linear(WIDTH, 12, bias=False),
        "brief": nn.Linear(WIDTH, 12, dtype=torch.bfloat16),
    }
    square = nn.Parameter(drawn(WIDTH, WIDTH))
    return Captured(Cases({**functions, "attention": _attention}, **linears, square=square))


def _fuse(captured: Captured, name: str) -> tuple[fx.GraphModule, PassReport]:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    return graph_module, run_pass(FuseLinears(), graph_module)


def _check_numbers(captured: Captured, graph_module: fx.GraphModule, name: str) -> None:
    ids = tokens(11)
    torch.testing.assert_close(run_on_prompt(graph_module, ids), captured.logits(name, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", FUSED)
def test_fused(captured: Captured, name: str) -> None:
    graph_module, report = _fuse(captured, name)
    _, groups, linears = FUSED[name]
    counts = count_ops(graph_module)
    assert report.matches == counts["aten.split_with_sizes"] == groups
    assert counts["aten.linear"] == linears
    _check_numbers(captured, graph_module, name)
    check_linears_fused(graph_module, PassContext())


@pytest.mark.parametrize("name", ALONE)
def test_left_alone(captured: Captured, name: str) -> None:
    before = captured.graph(name)
    run_pass(Canonicalize(), before)
    graph_module, report = _fuse(captured, name)
    _, linears, why = ALONE[name]
    assert report.matches == 0 and count_ops(graph_module)["aten.linear"] == linears
    assert count_ops(graph_module) == count_ops(before)
    assert (why in report.skipped[0].why) if why else not report.skipped
    _check_numbers(captured, graph_module, name)


def test_parts_that_can_be_fused_are_although_another_cannot(captured: Captured) -> None:
    cases = Cases(
        {"three": lambda at: _sum(F.linear(at.x, at.square * 2), at.twelve(at.x), at.eight(at.x))},
        twelve=nn.Linear(WIDTH, 12),
        eight=nn.Linear(WIDTH, 8),
        square=nn.Parameter(drawn(WIDTH, WIDTH)),
    )
    captured = Captured(cases)
    graph_module, report = _fuse(captured, "three")
    assert report.matches == 1 and len(report.skipped) == 1
    assert count_ops(graph_module)["aten.linear"] == 2
    _check_numbers(captured, graph_module, "three")


def test_weight_of_the_fused_linear(captured: Captured) -> None:
    """Rows of the weights one under the other, zeros for a bias that is not there; nothing else is kept."""
    graph_module, _ = _fuse(captured, "bias_on_some")
    cases = captured.cases
    parameters = {name: p for name, p in graph_module.named_parameters() if "fused" in name}
    weight, bias = parameters.values()
    expected = [cases.plain.weight, cases.twelve.weight, cases.eight.weight]
    torch.testing.assert_close(weight, torch.cat(expected))
    torch.testing.assert_close(bias, torch.cat([torch.zeros(12), cases.twelve.bias, cases.eight.bias]))
    assert not weight.requires_grad
    kept = {id(tensor) for tensor in graph_module.parameters()}
    assert not kept & {id(tensor) for tensor in (*expected, cases.twelve.bias, cases.eight.bias)}
    assert len(kept) == 3  # and the embedding


def test_single_weights_are_gone_when_the_model_is() -> None:
    linears = {name: nn.Linear(WIDTH, 12) for name in ("twelve", "plain", "other")}
    cases = Cases({"attention": _attention}, **linears)
    old = [weakref.ref(linear.weight) for linear in (cases.twelve, cases.plain, cases.other)]
    captured = Captured(cases)
    graph_module = captured.graph("attention")
    context = run_passes(graph_module, stop_after="gather_logits", max_positions=64)
    expected = captured.logits("attention", tokens(9))
    del cases, captured, linears
    gc.collect()
    assert not any(reference() is not None for reference in old)
    torch.testing.assert_close(run_on_prompt(graph_module, tokens(9)), expected, atol=1e-5, rtol=1e-5)
    assert context.facts >= {"linears_fused"}


def test_served(captured: Captured) -> None:
    serve(captured, "attention", max_positions=64)


def test_a_weight_tied_under_two_names_is_not_copied() -> None:
    """The LM head is the embedding; another linear reads the same input."""
    cases = Cases(
        {"out": lambda at: _sum(at.head(at.x), at.eight(at.x))}, head=nn.Linear(WIDTH, 29), eight=nn.Linear(WIDTH, 8)
    )
    cases.head.weight = cases.embed.weight
    graph_module, report = _fuse(Captured(cases), "out")
    assert report.matches == 0
    assert {id(p) for p in graph_module.parameters()} >= {id(cases.embed.weight)}


def test_the_fact_is_checked(captured: Captured) -> None:
    graph_module = captured.graph("two")
    run_pass(Canonicalize(), graph_module)
    with pytest.raises(PassError, match="read the same input"):
        check_linears_fused(graph_module, PassContext())
