"""fuse_residuals: the residual is added where the linear is made, and no other sum is touched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import chunkc.passes.linear_calls as linear_calls
from chunkc.errors import PassError
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.passes.base import PassContext, PassReport
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fuse_gates import FuseGates
from chunkc.passes.fuse_linears import FuseLinears
from chunkc.passes.fuse_residuals import FuseResiduals, check_residuals_fused
from chunkc.passes.fx_tools import absorbed_modules, is_call, module_path
from chunkc.passes.pack_linears import PackLinears
from chunkc.rewriting import rewrite

from .graphs import WIDTH, Captured, Cases, count_ops, drawn, huggingface, reference_logits, run_pass, tokens

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32) or active_body(torch.float32) != "own", reason="no kernel of ours on this machine"
)


def _twice(at: SimpleNamespace) -> torch.Tensor:
    x = at.x + at.plain(at.x)
    return x + at.biased(x)


#: name: (function, residuals)
FUSED = {
    "residual_first": (lambda at: at.x + at.plain(at.x), 1),
    "residual_last": (lambda at: at.biased(at.x) + at.x, 1),
    "one_after_the_other": (_twice, 2),
    "two_linears": (lambda at: at.plain(at.x) + at.biased(at.x.exp()), 1),
    "three_in_parallel": (lambda at: at.plain(at.x) + at.biased(at.x.exp()) + at.x, 1),
    "with_gates": (lambda at: at.wide(at.x.exp()) + F.silu(at.gate(at.x)) * at.up(at.x), 1),
    "a_view": (lambda at: at.plain(at.x) + at.wide(at.x.exp())[..., 4:], 1),
    "half_precision": (lambda at: (at.x.to(HALF) + at.brief(at.x.to(HALF))).float(), 1),
}
ALONE = {
    "read_twice": lambda at: (at.x + at.plain(at.x)) * at.plain(at.x),
    "with_itself": lambda at: at.plain(at.x) + at.plain(at.x),
    "a_row_for_all": lambda at: at.plain(at.x) + at.row,
    "a_row_in_three_dimensions": lambda at: at.plain(at.x) + at.row[None, None],
    "a_column_for_all": lambda at: at.plain(at.x) + at.x[..., :1],
    "the_linear_is_spread": lambda at: at.one(at.x) + at.x,
    "scaled": lambda at: torch.add(at.x, at.plain(at.x), alpha=2),
    "a_number": lambda at: at.plain(at.x) + 1,
    "difference": lambda at: at.x - at.plain(at.x),
    "in_between": lambda at: at.x + at.plain(at.x).tanh(),
    "half_and_whole": lambda at: at.x + at.brief(at.x.to(HALF)),
    "whole_and_half": lambda at: at.plain(at.x) + at.x.to(HALF),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {**{name: case[0] for name, case in FUSED.items()}, **ALONE}
    linears = {
        "plain": nn.Linear(WIDTH, WIDTH, bias=False),
        "biased": nn.Linear(WIDTH, WIDTH),
        "wide": nn.Linear(WIDTH, 16),
        "gate": nn.Linear(WIDTH, 16),
        "up": nn.Linear(WIDTH, 16),
        "one": nn.Linear(WIDTH, 1),
        "brief": nn.Linear(WIDTH, WIDTH, dtype=HALF),
    }
    return Captured(Cases(functions, row=drawn(WIDTH), **linears))


def packed(captured: Captured, name: str) -> fx.GraphModule:
    graph_module, context = captured.graph(name), PassContext()
    graph_module.meta["kept"] = context.resources
    for graph_pass in (Canonicalize(), FuseLinears(), FuseGates(), PackLinears()):
        run_pass(graph_pass, graph_module, context)
    return graph_module


def fuse(captured: Captured, name: str) -> tuple[fx.GraphModule, PassReport]:
    graph_module = packed(captured, name)
    return graph_module, run_pass(FuseResiduals(), graph_module)


def check_numbers(captured: Captured, graph_module: fx.GraphModule, name: str) -> None:
    ids, tolerance = tokens(11), 2e-2 if "half" in name else 1e-5
    expected = captured.logits(name, ids)
    torch.testing.assert_close(run_on_prompt(graph_module, ids), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", FUSED)
def test_fused(captured: Captured, name: str) -> None:
    if "half" in name and (not can_pack(HALF) or active_body(HALF) != "own"):
        pytest.skip("no kernel of ours for bfloat16 on this machine")
    before = count_ops(packed(captured, name))["aten.add"]
    graph_module, report = fuse(captured, name)
    count = FUSED[name][1]
    assert report.matches == count and before - count_ops(graph_module)["aten.add"] == count and not report.skipped
    nodes = graph_module.graph.find_nodes(op="call_function", target=torch.ops.chunkc.fused_linear.default)
    assert sum(node.args[7] is not None for node in nodes) == count
    check_numbers(captured, graph_module, name)
    check_residuals_fused(graph_module, PassContext())


@pytest.mark.parametrize("name", ALONE)
def test_left_alone(captured: Captured, name: str) -> None:
    graph_module, report = fuse(captured, name)
    assert report.matches == 0 and not report.skipped
    assert count_ops(graph_module) == count_ops(packed(captured, name))
    check_numbers(captured, graph_module, name)


def test_where_onednn_multiplies_it_is_said(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_calls, "active_body", lambda dtype: "onednn")
    graph_module, report = fuse(captured, "residual_first")
    assert report.matches == 0 and "no kernel of ours multiplies torch.float32" in report.skipped[0].why
    check_numbers(captured, graph_module, "residual_first")


def test_the_fact_is_checked(captured: Captured) -> None:
    with pytest.raises(PassError, match="is not fused"):
        check_residuals_fused(packed(captured, "residual_last"), PassContext())


def test_modules_whose_output_is_gone_are_known() -> None:
    """What computes the residual's sum says nothing of the attention's output any more."""
    done = rewrite(huggingface("llama")[0])
    nodes = done.graph_module.graph.nodes
    first = next(node for node in nodes if is_call(node, torch.ops.chunkc.fused_linear) and node.args[7] is not None)
    assert module_path(first) == "model.layers.0"
    assert absorbed_modules(first) == ["model.layers.0.self_attn", "model.layers.0.self_attn.o_proj"]
    assert not any(absorbed_modules(node) for node in nodes if not is_call(node, torch.ops.chunkc.fused_linear))


@pytest.mark.parametrize(
    "name, gates, norms, residuals",
    [
        ("llama", 2, 5, 4),
        ("qwen3", 2, 5, 4),  # but not those of queries and keys
        ("phi3", 2, 5, 4),
        ("gemma3_text", 2, 0, 0),
        ("mixtral", 0, 3, 2),
        ("gpt2", 0, 0, 0),
        ("gptj", 0, 0, 2),
        ("stablelm", 2, 0, 4),
    ],
)
def test_what_is_fused_in_models(name: str, gates: int, norms: int, residuals: int) -> None:
    """All three of these passes, on whole models."""
    model, _ = huggingface(name)
    done = rewrite(model)
    matches = {record.name: record.report.matches for record in done.records}
    assert (matches["fuse_gates"], matches["fuse_norms"], matches["fuse_residuals"]) == (gates, norms, residuals)
    ids = tokens(13, vocab=model.config.vocab_size)
    expected = reference_logits(model, ids)
    torch.testing.assert_close(run_on_prompt(done.graph_module, ids), expected, rtol=1e-4, atol=1e-4)
