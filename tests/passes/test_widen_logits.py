"""widen_logits: half precision's logits in float32, and nothing else is touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import chunkc.passes.pack_linears as pack_linears
import chunkc.passes.widen_logits as widen_logits
from chunkc.errors import PassError
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.passes.base import PassContext
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import output_node, value
from chunkc.passes.widen_logits import check_logits_wide
from chunkc.rewriting import rewrite

from .test_pack_linears import Small

HALF = torch.bfloat16
pytestmark = pytest.mark.skipif(not can_pack(HALF), reason="no packed kernel for bfloat16 on this machine")
ours = pytest.mark.skipif(
    not can_pack(HALF) or active_body(HALF) != "own", reason="no kernel of ours for bfloat16 on this machine"
)


class Scaled(Small):
    """Logits with a factor and a softcap, as Granite and Gemma 2 have them."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(super().forward(input_ids, position_ids) * 3.0 / 2.5) * 2.5


class Shifted(Small):
    """Logits with something added that was made in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(40))

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position_ids) + self.shift


class ReadTwice(Small):
    """The head's product is read a second time."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits * torch.sigmoid(logits)


def report_of(done):
    (report,) = [record.report for record in done.records if record.name == "widen_logits"]
    return report


@ours
@pytest.mark.parametrize("kind", [Small, Scaled])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_not_rounded(kind, tied):
    model = kind(tied).eval().to(HALF)
    rounded = rewrite(model, stop_after="pack_linears")
    done = rewrite(model, stop_after="widen_logits")  # what is fused behind it rounds less
    assert report_of(done).matches == 1
    ids = torch.randint(40, (11,))
    before, after = run_on_prompt(rounded.graph_module, ids), run_on_prompt(done.graph_module, ids)
    assert before.dtype is HALF and after.dtype is torch.float32
    torch.testing.assert_close(after, before.float(), rtol=3e-2, atol=3e-2)
    if kind is Small:  # rounded once, at the end: the same product
        assert torch.equal(after.to(HALF), before)
    assert not torch.equal(after, after.to(HALF).float())


@pytest.mark.parametrize("kind", [Shifted, ReadTwice])
def test_what_else_is_made_of_the_product_stays_as_it_is(kind):
    model = kind().eval().to(HALF)
    done = rewrite(model)
    report = report_of(done)
    assert report.matches == 0 and "no packed linear alone" in report.skipped[0].why
    ids = torch.randint(40, (7,))
    with torch.no_grad():
        expected = model(ids[None], torch.arange(7)[None])[0]
    logits = run_on_prompt(done.graph_module, ids)
    assert logits.dtype is HALF
    torch.testing.assert_close(logits, expected, rtol=3e-2, atol=3e-2)


def test_float32_and_unpacked_linears_are_left_alone(monkeypatch):
    assert report_of(rewrite(Small().eval())).matches == 0
    monkeypatch.setattr(pack_linears, "can_pack", lambda dtype: False)
    done = rewrite(Small().eval().to(HALF))
    assert report_of(done).matches == 0 and value(output_node(done.graph_module.graph)).dtype is HALF


def test_where_onednn_rounds_it_is_said(monkeypatch):
    """In float32 they would look like sums, and be none."""
    monkeypatch.setattr(widen_logits, "active_body", lambda dtype: "onednn")
    done = rewrite(Small().eval().to(HALF))
    report = report_of(done)
    assert report.matches == 0 and "oneDNN rounds" in report.skipped[0].why and report.skipped[0].what == "head"
    assert run_on_prompt(done.graph_module, torch.arange(5)).dtype is HALF


@ours
def test_logits_that_are_rounded_though_they_need_not_be_are_found():
    rounded = rewrite(Small().eval().to(HALF), stop_after="pack_linears").graph_module
    with pytest.raises(PassError, match=r"the logits are torch\.bfloat16"):
        check_logits_wide(rounded, PassContext())
