"""split_layers: cuts where little is live, equal layers that are found equal, and the same numbers in pieces."""

from __future__ import annotations

import functools

import pytest
import torch
from tiny import build
from torch import nn

from chunkc.errors import PassError
from chunkc.lower import lower
from chunkc.parts import Part, cut
from chunkc.passes.execute import prompt_inputs, run_on_prompt
from chunkc.passes.facts import check_fact
from chunkc.passes.fx_tools import placeholders, value
from chunkc.passes.split_layers import _PART
from chunkc.program import LoweredGraph
from chunkc.rewriting import Rewritten, rewrite
from chunkc.runtime.deferred_logits import rows_of
from chunkc.structure import describe

IDS = torch.arange(23) * 7 % 40

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]}
#: model, what is changed in it, and the kind of each of its parts
KINDS = {
    "llama": ({}, [0, 1, 1, 1, 1, 2]),
    "gpt2": ({}, [0, 1, 1, 1, 1, 2]),
    "gpt_neox": ({}, [0, 1, 1, 1, 1, 2]),  # attention and MLP side by side
    "gemma3_text": (ALTERNATING, [0, 1, 2, 1, 2, 3]),
    "gpt_oss": (ALTERNATING, [0, 1, 2, 1, 2, 3]),
    "mixtral": ({}, [0, 1, 1, 1, 1, 2]),
    "deepseek_v3": ({}, [0, 1, 2, 2, 2, 3]),  # the first layer has a dense MLP
}
#: the default run sees three of them
NAMES = [
    pytest.param(name, marks=[] if name in ("llama", "gemma3_text", "deepseek_v3") else pytest.mark.slow)
    for name in KINDS
]


class Unequal(nn.Module):
    """Layers of one attention and one MLP, no two of the same width."""

    def __init__(self, widths: tuple[int, ...], shared: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(40, 32), nn.Linear(32, 40)
        self.qkv = nn.ModuleList(nn.Linear(32, 96) for _ in widths)
        self.up = nn.ModuleList(nn.Linear(32, width) for width in widths)
        self.down = nn.ModuleList(nn.Linear(width, 32) for width in widths)
        self.shared = shared

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(input_ids)
        for qkv, up, down in zip(self.qkv, self.up, self.down, strict=True):
            q, k, v = qkv(x).view(1, -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
            attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + attended.transpose(1, 2).reshape(x.shape)
            x = x + down(nn.functional.silu(up(x)))
            x = x + first if self.shared else x
        return self.head(x)


@functools.cache
def rewritten(name: str) -> Rewritten:
    overrides, _ = KINDS[name]
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    return rewrite(build(name, **{layers: 5}, **overrides))


def kinds(parts: list[Part]) -> list[int]:
    numbers: dict[str, int] = {}
    return [numbers.setdefault(describe(part.graph_module.graph), len(numbers)) for part in parts]


def lowered(done: Rewritten) -> tuple[LoweredGraph, dict[str, torch.Tensor]]:
    names = list(placeholders(done.graph_module.graph))
    inputs = dict(zip(names, prompt_inputs(done.graph_module, IDS), strict=True))
    return lower(done.graph_module, "eager", done.context.resources), inputs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "deepseek_v3" else name for name in NAMES]
)
def test_equal_layers_are_found_equal(name):
    assert kinds(cut(rewritten(name).graph_module)) == KINDS[name][1]


@pytest.mark.parametrize("name", NAMES)
def test_between_layers_only_the_residual_stream_is_live(name):
    for part in cut(rewritten(name).graph_module)[1:-1]:
        (output,) = part.graph_module.graph.output_node().args[0]
        assert list(value(output).shape[::2]) == [1, 64]
        assert len(part.outputs) == 1


def test_what_layers_share_is_computed_once():
    """The rotary tables are in the first part, and no other computes a cosine."""
    parts = cut(rewritten("llama").graph_module)
    with_cosine = [i for i, part in enumerate(parts) if "aten.cos" in describe(part.graph_module.graph)]
    assert with_cosine == [0]


def test_inputs_that_are_alike_are_told_apart():
    """Inductor takes two inputs with the same fake value for one: cosines and sines have the same shape."""
    for part in cut(rewritten("llama").graph_module):
        values = [node.meta["val"] for node in part.graph_module.graph.nodes if node.op == "placeholder"]
        assert len(set(map(id, values))) == len(values) > 1


@pytest.mark.parametrize("name", ["mixtral"])
def test_parts_compute_what_the_graph_does(name):
    done = rewrite(build(name))
    expected = run_on_prompt(done.graph_module, IDS)
    graph, inputs = lowered(done)
    with torch.no_grad():
        assert torch.equal(rows_of(graph(inputs)).reshape(expected.shape), expected)


def test_layers_that_all_differ_are_parts_of_their_own():
    done = rewrite(Unequal((16, 24, 32, 40)).eval())
    assert kinds(cut(done.graph_module)) == [0, 1, 2, 3, 4]
    expected = run_on_prompt(done.graph_module, IDS)
    graph, inputs = lowered(done)
    with torch.no_grad():
        torch.testing.assert_close(rows_of(graph(inputs)).reshape(expected.shape), expected)


def test_layers_that_all_use_the_embedding():
    """All but the first, for which it is the residual stream too, are equal."""
    done = rewrite(Unequal((16, 16, 16, 16, 16), shared=True).eval())
    assert kinds(cut(done.graph_module)) == [0, 1, 1, 1, 2]
    expected = run_on_prompt(done.graph_module, IDS)
    graph, inputs = lowered(done)
    with torch.no_grad():
        torch.testing.assert_close(rows_of(graph(inputs)).reshape(expected.shape), expected)


def test_a_model_of_one_layer_stays_whole():
    done = rewrite(Unequal((16,)).eval())
    assert len(cut(done.graph_module)) == 1


def test_a_step_can_stop_between_any_two_parts():
    done = rewrite(Unequal((16, 24, 16, 24)).eval())
    expected = run_on_prompt(done.graph_module, IDS)
    graph, inputs = lowered(done)
    for stop in range(graph.num_parts + 1):
        with torch.no_grad():
            state = graph.start(inputs)
            graph.advance(state, 0, stop)
            live = [tensor for tensor in state if tensor is not None]
            graph.advance(state, stop, graph.num_parts)
        torch.testing.assert_close(rows_of(graph.logits(state)).reshape(expected.shape), expected)
        assert len(live) <= len(state)


def test_values_are_let_go_when_no_part_needs_them():
    done = rewrite(build("llama"))
    graph, inputs = lowered(done)
    before = sum(tensor is not None for tensor in graph.start(inputs))
    state = graph.start(inputs)
    with torch.no_grad():
        graph.advance(state, 0, graph.num_parts)
    # what the head multiplies has come, and every input of the step is gone
    assert sum(tensor is not None for tensor in state) == before - len(inputs) + 1


def test_parts_out_of_order_are_noticed():
    done = rewrite(Unequal((16, 24)).eval())
    nodes = [node for node in done.graph_module.graph.nodes if node.op == "call_function"]
    nodes[0].meta[_PART] = 99
    with pytest.raises(PassError, match="interleaved"):
        check_fact("layers_split", done.graph_module, done.context)
