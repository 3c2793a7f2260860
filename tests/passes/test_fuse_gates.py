"""fuse_gates: gates and what they let through become one call; what is anything else stays."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import chunkc.passes.linear_calls as linear_calls
from chunkc.errors import PassError
from chunkc.kernels.fused_linear import Activation
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.passes.attributes import set_attribute
from chunkc.passes.base import PassContext, PassReport
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fuse_gates import FuseGates, check_gates_fused
from chunkc.passes.fuse_linears import FuseLinears
from chunkc.passes.made_tensors import Packed, make
from chunkc.passes.pack_linears import PackLinears

from .graphs import WIDTH, Captured, Cases, count_ops, run_pass, tokens

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not can_pack(torch.float32) or active_body(torch.float32) != "own", reason="no kernel of ours on this machine"
)


def _halves(at: SimpleNamespace) -> tuple[torch.Tensor, ...]:
    return at.merged(at.x).chunk(2, dim=-1)


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


#: name: (function, activation)
FUSED = {
    "silu": (lambda at: F.silu(at.gate(at.x)) * at.up(at.x), Activation.SILU),
    "gelu": (lambda at: _gelu(at.gate(at.x)) * at.up(at.x), Activation.GELU_TANH),
    "bias_on_one": (lambda at: F.silu(at.gate(at.x)) * at.biased(at.x), Activation.SILU),
    "merged_in_the_model": (lambda at: _halves(at)[1] * F.silu(_halves(at)[0]), Activation.SILU),
    "then_down": (lambda at: at.down(F.silu(at.gate(at.x)) * at.up(at.x)), Activation.SILU),
    "half_precision": (
        lambda at: (F.silu(at.half_gate(at.x.to(HALF))) * at.half_up(at.x.to(HALF))).float(),
        Activation.SILU,
    ),
}
#: name: (function, why it was left alone, where it is said)
ALONE = {
    "exact_gelu": (lambda at: F.gelu(at.gate(at.x)) * at.up(at.x), None),
    "other_activation": (lambda at: F.relu(at.gate(at.x)) * at.up(at.x), None),
    "of_the_wrong_half": (lambda at: _halves(at)[0] * F.silu(_halves(at)[1]), None),
    "of_both_halves": (lambda at: F.silu(_halves(at)[0]) * F.silu(_halves(at)[1]), None),
    "up_comes_first": (lambda at: at.up(at.x) * F.silu(at.gate(at.x)), None),
    "one_half": (lambda at: F.silu(_halves(at)[0]) * _halves(at)[0], None),
    "sum": (lambda at: F.silu(at.gate(at.x)) + at.up(at.x), None),
    "times_a_number": (lambda at: F.silu(_halves(at)[0]) * 2, None),
    "of_other_inputs": (lambda at: F.silu(at.gate(at.x)) * at.up(at.x.exp()), None),
    "gate_is_read_twice": (lambda at: F.silu(at.gate(at.x)) * at.up(at.x) + at.gate(at.x), None),
    "activated_is_read_twice": (lambda at: F.silu(at.gate(at.x)) * at.up(at.x) + F.silu(at.gate(at.x)), None),
    "up_is_read_twice": (lambda at: F.silu(at.gate(at.x)) * at.up(at.x) + at.up(at.x), None),
    "three_parts": (lambda at: F.silu(at.gate(at.x)) * at.up(at.x) + at.biased(at.x), None),
    "uneven_parts": (lambda at: F.silu(at.gate(at.x))[..., :16] * at.sixteen(at.x), None),
    "narrow": (lambda at: F.silu(at.narrow(at.x)) * at.narrow_up(at.x), "no multiple of 8"),
    "computed": (lambda at: _split(F.linear(at.x, at.merged.weight * 2)), "is computed"),
    "weight_is_read_twice": (lambda at: _split(at.merged(at.x)) + at.merged.weight.sum(), "used elsewhere"),
}


def _split(product: torch.Tensor) -> torch.Tensor:
    gates, rest = product.chunk(2, dim=-1)
    return F.silu(gates) * rest


@pytest.fixture(scope="module")
def captured() -> Captured:
    linears = {
        "gate": nn.Linear(WIDTH, 24, bias=False),
        "up": nn.Linear(WIDTH, 24, bias=False),
        "biased": nn.Linear(WIDTH, 24),
        "merged": nn.Linear(WIDTH, 48),
        "down": nn.Linear(24, WIDTH),
        "sixteen": nn.Linear(WIDTH, 16),
        "narrow": nn.Linear(WIDTH, 12),
        "narrow_up": nn.Linear(WIDTH, 12),
        "half_gate": nn.Linear(WIDTH, 24, dtype=HALF),
        "half_up": nn.Linear(WIDTH, 24, dtype=HALF),
    }
    functions = {name: case[0] for name, case in {**FUSED, **ALONE}.items()}
    return Captured(Cases(functions, **linears))


def fuse(captured: Captured, name: str, context: PassContext | None = None) -> tuple[fx.GraphModule, PassReport]:
    graph_module, context = captured.graph(name), context or PassContext()
    graph_module.meta["kept"] = context.resources
    for graph_pass in (Canonicalize(), FuseLinears()):
        run_pass(graph_pass, graph_module, context)
    return graph_module, run_pass(FuseGates(), graph_module, context)


def check_numbers(captured: Captured, graph_module: fx.GraphModule, name: str) -> None:
    ids, tolerance = tokens(11), 2e-2 if "half" in name else 1e-5
    expected = captured.logits(name, ids)
    torch.testing.assert_close(run_on_prompt(graph_module, ids), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", FUSED)
def test_fused(captured: Captured, name: str) -> None:
    if "half" in name and (not can_pack(HALF) or active_body(HALF) != "own"):
        pytest.skip("no kernel of ours for bfloat16 on this machine")
    context = PassContext()
    graph_module, report = fuse(captured, name, context)
    counts = count_ops(graph_module)
    assert report.matches == counts["chunkc.fused_linear"] == 1 and not report.skipped
    assert counts["aten.linear"] == (name == "then_down") and not counts["aten.split_with_sizes"]
    (node,) = graph_module.graph.find_nodes(op="call_function", target=torch.ops.chunkc.fused_linear.default)
    assert node.args[3] == 24 and node.args[6] == FUSED[name][1]
    check_numbers(captured, graph_module, name)
    check_gates_fused(graph_module, PassContext())
    run_pass(PackLinears(), graph_module, context)
    check_numbers(captured, graph_module, name)


@pytest.mark.parametrize("name", ALONE)
def test_left_alone(captured: Captured, name: str) -> None:
    graph_module, report = fuse(captured, name)
    why = ALONE[name][1]
    assert report.matches == 0 and not count_ops(graph_module)["chunkc.fused_linear"]
    assert [why in skipped.why for skipped in report.skipped] == [True] if why else not report.skipped
    check_numbers(captured, graph_module, name)


def test_where_onednn_multiplies_it_is_said(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_calls, "active_body", lambda dtype: "onednn")
    graph_module, report = fuse(captured, "silu")
    assert report.matches == 0 and "no kernel of ours multiplies torch.float32" in report.skipped[0].why
    check_numbers(captured, graph_module, "silu")


def test_a_weight_that_is_made_later_is_the_same(captured: Captured) -> None:
    context = PassContext(deferred=True)
    graph_module, _ = fuse(captured, "bias_on_one", context)
    assert not context.resources and context.made["gated_linear_0"] == Packed("fused_linear_0_weight", False, True)
    for name in context.made:
        if hasattr(graph_module, name):
            delattr(graph_module, name)
            made = make(name, context.made, context.ingredients.__getitem__, context.resources)
            set_attribute(graph_module, name, made)
    graph_module.recompile()
    check_numbers(captured, graph_module, "bias_on_one")


def test_plain_weights_are_let_go() -> None:
    linears = {name: nn.Linear(WIDTH, 24) for name in ("gate", "up")}
    cases = Cases({"silu": FUSED["silu"][0]}, **linears)
    alive = [weakref.ref(linear.weight) for linear in linears.values()]
    captured = Captured(cases)
    graph_module, _ = fuse(captured, "silu")
    expected = captured.logits("silu", tokens(9))
    assert len(list(graph_module.parameters())) == 2  # the embedding and the bias
    del cases, captured, linears
    gc.collect()
    assert not any(reference() is not None for reference in alive)
    torch.testing.assert_close(run_on_prompt(graph_module, tokens(9)), expected, atol=1e-5, rtol=1e-5)


def test_the_fact_is_checked(captured: Captured) -> None:
    graph_module = captured.graph("silu")
    for graph_pass in (Canonicalize(), FuseLinears()):
        run_pass(graph_pass, graph_module)
    with pytest.raises(PassError, match="are not fused"):
        check_gates_fused(graph_module, PassContext())
