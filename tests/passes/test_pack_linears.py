"""pack_linears: weights behind handles, the same numbers, and nothing kept twice."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import chunkc.passes.pack_linears as pack_linears
from chunkc.kernels.packed_linear import active_body, can_pack
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import aten, is_call
from chunkc.rewriting import rewrite

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")


class Small(nn.Module):
    """One attention, a biased MLP, and a head that may share its weight with the embedding."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, 32)
        self.qkv = nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32, bias=False)
        self.head = nn.Linear(32, 40, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).view(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + attended.transpose(1, 2).reshape(x.shape)
        return self.head(x + self.down(nn.functional.silu(self.up(x))))


def counts(graph_module, *targets):
    return [sum(is_call(node, target) for node in graph_module.graph.nodes) for target in targets]


def test_every_linear_is_packed_and_the_numbers_stay():
    model = Small().eval()
    before = rewrite(model, stop_after="gather_logits").graph_module
    assert counts(before, aten.linear, torch.ops.chunkc.packed_linear) == [4, 0]
    done = rewrite(model, stop_after="pack_linears")
    assert counts(done.graph_module, aten.linear, torch.ops.chunkc.packed_linear) == [0, 4]
    ids = torch.randint(40, (11,))
    with torch.no_grad():
        expected = model(ids[None], torch.arange(11)[None])[0]
    torch.testing.assert_close(run_on_prompt(done.graph_module, ids), expected, rtol=1e-4, atol=1e-4)


def test_plain_weights_are_let_go():
    model = Small().eval()
    done = rewrite(model)
    alive = weakref.ref(model.up.weight)
    del model
    gc.collect()
    assert alive() is None
    assert run_on_prompt(done.graph_module, torch.arange(5)).isfinite().all()


def test_a_tied_weight_serves_both_uses():
    model = Small(tied=True).eval()
    done = rewrite(model, stop_after="pack_linears")
    one_copy = active_body(torch.float32) == "own"  # whose rows can be read
    assert counts(done.graph_module, aten.embedding, torch.ops.chunkc.packed_rows) == [not one_copy, one_copy]
    assert counts(done.graph_module, torch.ops.chunkc.packed_linear) == [4]
    assert ("hf.embed.weight" in dict(done.graph_module.named_parameters())) is not one_copy
    ids = torch.randint(40, (9,))
    with torch.no_grad():
        expected = model(ids[None], torch.arange(9)[None])[0]
    torch.testing.assert_close(run_on_prompt(done.graph_module, ids), expected, rtol=1e-4, atol=1e-4)


class ReadsItsEmbedding(Small):
    """The tied weight is used in a third way, too."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, position_ids) + self.embed.weight.sum()


def test_a_tied_weight_that_is_read_otherwise_too_is_kept():
    model = ReadsItsEmbedding(tied=True).eval()
    done = rewrite(model)
    assert counts(done.graph_module, aten.embedding, torch.ops.chunkc.packed_rows) == [1, 0]


def test_a_dtype_without_a_packed_kernel_is_left_alone_and_said(monkeypatch):
    monkeypatch.setattr(pack_linears, "can_pack", lambda dtype: False)
    done = rewrite(Small().eval())
    assert counts(done.graph_module, aten.linear, torch.ops.chunkc.packed_linear) == [4, 0]
    (report,) = [record.report for record in done.records if record.name == "pack_linears"]
    assert report.matches == 0 and len(report.skipped) == 4
    assert "no packed kernel for torch.float32" in report.skipped[0].why
