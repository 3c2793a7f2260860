"""The short way to a functional graph gives what the decomposition gives, and is only taken where it does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from chunkc import compat, functional
from chunkc.functional import functional_module
from chunkc.structure import describe

sys.path.insert(0, str(Path(__file__).parent / "models"))


class Casts(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.to(torch.float64).to(torch.float64).to("cpu").to(torch.float32)
        return nn.functional.dropout(y.view(-1, 4).reshape(-1, 2), training=False) + 1


class Copies(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32, copy=True) + 1


class InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 1:].add_(1)
        return y


class Views(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.t().contiguous().chunk(2)
        return one.flatten() * other.flatten()


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    with torch.no_grad(), compat.one_graph_for_every_size():
        sizes = ({0: torch.export.Dim.DYNAMIC},)
        return torch.export.export(module.eval(), (torch.randn(13, 4),), dynamic_shapes=sizes, strict=False)


@pytest.mark.parametrize("module, short", [(Casts(), True), (Copies(), False), (InPlace(), False), (Views(), False)])
def test_the_result_is_the_modules(module, short, monkeypatch):
    decomposed = []
    original = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda self, table: decomposed.append(1) or original(self, table),
    )
    graph_module = functional_module(exported(module))
    assert bool(decomposed) is not short
    for node in graph_module.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable
        assert "aten.to." not in str(node.target)
    x = torch.randn(6, 4)
    with torch.no_grad():
        torch.testing.assert_close(graph_module(x)[0], module(x.clone()))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_both_ways_end_in_the_same_graph(name, monkeypatch):
    from tiny import build

    from chunkc.parts import cut
    from chunkc.rewriting import rewrite

    model = build(name)
    texts = []
    for short in (True, False):
        if not short:
            monkeypatch.setattr(functional, "_is_simple", lambda node: False)
        graph_module = rewrite(model, stop_after="ragged_tokens").graph_module
        texts.append([describe(part.graph_module.graph) for part in cut(graph_module)])
    assert texts[0] == texts[1]
