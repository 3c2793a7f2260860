"""fuse_norms: Llama's norm goes into the linear that reads it, and nothing that only looks like it."""

from __future__ import annotations

import pytest
import torch
from torch import fx, nn

import chunkc.passes.linear_calls as linear_calls
from chunkc.errors import PassError
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.passes.base import PassContext, PassReport
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fuse_gates import FuseGates
from chunkc.passes.fuse_linears import FuseLinears
from chunkc.passes.fuse_norms import FuseNorms, check_norms_fused
from chunkc.passes.fuse_residuals import FuseResiduals
from chunkc.passes.pack_linears import PackLinears

from .graphs import WIDTH, Captured, Cases, count_ops, drawn, run_pass, tokens

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32) or active_body(torch.float32) != "own", reason="no kernel of ours on this machine"
)


def scaled(x: torch.Tensor, eps: float | torch.Tensor = 1e-3, dim: int = -1, power: int = 2) -> torch.Tensor:
    """x in float32, over the root of its mean square."""
    wide = x.to(torch.float32)
    return wide * torch.rsqrt(wide.pow(power).mean(dim, keepdim=True) + eps)


def norm(x: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
    """As ``LlamaRMSNorm`` writes it."""
    return weight * scaled(x, **options).to(x.dtype)


def _halfway(at):
    x = at.x.to(HALF)
    return (x + at.brief(norm(x, at.half_weight))).float()


#: name: function
FUSED = {
    "llama": lambda at: at.plain(norm(at.x, at.weight)),
    "weight_last": lambda at: at.biased(scaled(at.x) * at.weight),
    "root_first": lambda at: at.plain(at.weight * (torch.rsqrt(at.x.pow(2).mean(2, True) + 1) * at.x)),
    "several_linears": lambda at: torch.cat([f(norm(at.x, at.weight)) for f in (at.plain, at.biased)], -1),
    "the_residual_is_what_is_normed": lambda at: at.x + at.plain(norm(at.x, at.weight)),
    "gated": lambda at: nn.functional.silu(at.gate(norm(at.x, at.weight))) * at.up(norm(at.x, at.weight)),
    "half_precision": lambda at: at.brief(norm(at.x.to(HALF), at.half_weight)).float(),
    "half_precision_and_residual": _halfway,
}
ALONE = {
    "read_twice": lambda at: at.plain(norm(at.x, at.weight)) * norm(at.x, at.weight),
    "it_is_the_residual": lambda at: norm(at.x, at.weight) + at.plain(norm(at.x, at.weight)),
    "something_in_between": lambda at: at.plain(norm(at.x, at.weight).tanh()),
    "a_part_is_read": lambda at: at.plain(norm(at.x, at.weight)) + scaled(at.x),
    "the_root_is_read": lambda at: at.plain(norm(at.x, at.weight)) + torch.rsqrt(at.x.pow(2).mean(-1, True) + 1e-3),
    "eps_is_a_tensor": lambda at: at.plain(norm(at.x, at.weight, eps=at.eps)),
    "no_eps": lambda at: at.plain(at.weight * (at.x * torch.rsqrt(at.x.pow(2).mean(-1, keepdim=True)))),
    "other_dimension": lambda at: at.plain(norm(at.x, at.weight, dim=1)),
    "two_dimensions": lambda at: at.plain(norm(at.x, at.weight, dim=(1, 2))),
    "other_power": lambda at: at.plain(norm(at.x, at.weight, power=4)),
    "of_something_else": lambda at: at.plain(at.weight * (at.x * torch.rsqrt(at.x.exp().pow(2).mean(-1, True) + 1))),
    "root_only": lambda at: at.plain(at.weight * torch.rsqrt(at.x.pow(2).mean(-1, True) + 1)),
    "layer_norm": lambda at: at.plain(at.layer_norm(at.x)),
    "less_the_mean": lambda at: at.plain(norm(at.x - at.x.mean(-1, True), at.weight) + at.weight),
    "one_plus_the_weight": lambda at: at.plain(norm(at.x, 1.0 + at.weight)),
    "no_weight": lambda at: at.plain(scaled(at.x)),
    "one_number_as_the_weight": lambda at: at.plain(norm(at.x, at.one)),
    "weight_a_matrix": lambda at: at.plain(norm(at.x, at.matrix)),
    "half_weight_before_rounding": lambda at: at.brief((at.half_weight * scaled(at.x.to(HALF))).to(HALF)).float(),
    "half_of_whole_numbers": lambda at: at.brief(at.half_weight * scaled(at.x).to(HALF)).float(),
    "half_then_whole_weight": lambda at: at.plain(at.weight * scaled(at.x.to(HALF)).to(HALF)),
    "half_statistics": lambda at: at.brief(
        at.half_weight * (at.x.to(HALF) * torch.rsqrt(at.x.to(HALF).pow(2).mean(-1, True) + 1e-3))
    ).float(),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    linears = {
        "plain": nn.Linear(WIDTH, WIDTH, bias=False),
        "biased": nn.Linear(WIDTH, WIDTH),
        "gate": nn.Linear(WIDTH, 16),
        "up": nn.Linear(WIDTH, 16),
        "brief": nn.Linear(WIDTH, WIDTH, dtype=HALF),
        "layer_norm": nn.LayerNorm(WIDTH),
    }
    weights = {
        "weight": nn.Parameter(torch.ones(WIDTH)),
        "half_weight": nn.Parameter(torch.ones(WIDTH, dtype=HALF)),
        "one": nn.Parameter(torch.ones(1)),
        "matrix": nn.Parameter(torch.ones(1, WIDTH)),
        "eps": drawn(1).abs(),
    }
    return Captured(Cases({**FUSED, **ALONE}, **linears, **weights))


def packed(captured: Captured, name: str) -> fx.GraphModule:
    graph_module, context = captured.graph(name), PassContext()
    graph_module.meta["kept"] = context.resources
    for graph_pass in (Canonicalize(), FuseLinears(), FuseGates(), PackLinears()):
        run_pass(graph_pass, graph_module, context)
    return graph_module


def fuse(captured: Captured, name: str) -> tuple[fx.GraphModule, PassReport]:
    graph_module = packed(captured, name)
    return graph_module, run_pass(FuseNorms(), graph_module)


def check_numbers(captured: Captured, graph_module: fx.GraphModule, name: str) -> None:
    ids, tolerance = tokens(11), 3e-2 if "half" in name else 1e-5
    expected = captured.logits(name, ids)
    torch.testing.assert_close(run_on_prompt(graph_module, ids), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", FUSED)
def test_fused(captured: Captured, name: str) -> None:
    if "half" in name and (not can_pack(HALF) or active_body(HALF) != "own"):
        pytest.skip("no kernel of ours for bfloat16 on this machine")
    graph_module, report = fuse(captured, name)
    counts = count_ops(graph_module)
    assert report.matches == 1 and not report.skipped
    assert not counts["aten.rsqrt"] and not counts["aten.mean"]
    (node,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.chunkc.fused_linear.default)
    assert node.args[4].op == "get_attr" and node.args[5] == (1.0 if name == "root_first" else 1e-3)
    check_numbers(captured, graph_module, name)
    check_norms_fused(graph_module, PassContext())
    run_pass(FuseResiduals(), graph_module)
    check_numbers(captured, graph_module, name)


@pytest.mark.parametrize("name", ALONE)
def test_left_alone(captured: Captured, name: str) -> None:
    graph_module, report = fuse(captured, name)
    assert report.matches == 0 and not report.skipped
    assert count_ops(graph_module) == count_ops(packed(captured, name))
    check_numbers(captured, graph_module, name)


def test_a_norm_is_not_taken_into_what_adds_it(captured: Captured) -> None:
    """The other order of passes: the residual is the norm's result by then."""
    graph_module = packed(captured, "it_is_the_residual")
    assert run_pass(FuseResiduals(), graph_module).matches == 1
    assert run_pass(FuseNorms(), graph_module).matches == 0
    check_numbers(captured, graph_module, "it_is_the_residual")


def test_where_onednn_multiplies_it_is_said(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_calls, "active_body", lambda dtype: "onednn")
    graph_module, report = fuse(captured, "llama")
    assert report.matches == 0 and "no kernel of ours multiplies torch.float32" in report.skipped[0].why
    check_numbers(captured, graph_module, "llama")


def test_the_fact_is_checked(captured: Captured) -> None:
    with pytest.raises(PassError, match="is not fused"):
        check_norms_fused(packed(captured, "llama"), PassContext())
