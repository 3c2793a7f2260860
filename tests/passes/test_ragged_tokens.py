"""ragged_tokens: flat inputs; positions come from the batch, row numbers stay row numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from chunkc.errors import PassError, UnsupportedModelError
from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import aten, placeholders, value

from .graphs import VOCAB, WIDTH, Batches, Captured, Cases, count_ops, drawn, run_passes, serve, tokens

LONGEST = 64


def _prepare(at: SimpleNamespace) -> None:
    at.size = at.ids.shape[1]
    at.row = torch.arange(at.size)


def _attended(at: SimpleNamespace, x: torch.Tensor) -> torch.Tensor:
    """One head of causal attention, so that the pipeline has something to do."""
    return x + F.scaled_dot_product_attention(*(linear(x)[:, None] for linear in at.qkv), is_causal=True)[:, 0]


def _own_entry(at: SimpleNamespace) -> torch.Tensor:
    """Each token's entry at a place that its id says: ``arange`` numbers rows."""
    return at.x * at.x[0][at.row, at.ids[0] % WIDTH][None, :, None]


def _both(at: SimpleNamespace) -> torch.Tensor:
    """One column of numbers serves as row numbers and as positions."""
    column = at.row[:, None]
    picked = at.x[0][column, (at.ids[0] % WIDTH)[:, None]]
    return at.x * picked[None] + at.table[column][:, 0]


POSITIONS = {
    "given": lambda at: at.x + at.embedding(at.positions),
    "numbered": lambda at: at.x + at.embedding(at.row),
    "numbered_with_start": lambda at: at.x + at.embedding(torch.arange(0, at.size)),
    "numbered_with_step": lambda at: at.x + at.embedding(torch.arange(0, at.size, 1)),
    "numbered_as_row": lambda at: at.x + at.embedding(at.row[None].expand(1, -1)),
    "numbered_with_offset": lambda at: at.x + at.table[at.row + 2],
    "numbered_by_index_select": lambda at: at.x + at.table.index_select(0, at.row),
    "angles": lambda at: at.x * (at.row.float()[:, None] * at.frequencies).cos(),
    "angles_by_product": lambda at: at.x * (at.row[:, None].to(at.x.dtype) @ at.frequencies[None]).sin(),
    "compared": lambda at: at.x * (at.row < 3)[:, None],
    "own_entry": _own_entry,
    "both": _both,
}
#: uses of numbers as positions that the pass finds
USES = {"given": 0, "own_entry": 0, "both": 1, "compared": 1, "angles_by_product": 1}

REFUSED = {
    "table_slice": (lambda at: at.x + at.table[: at.size], "takes as many rows|not a multiple"),
    "two_numbers_a_token": (
        lambda at: at.x + at.table[torch.arange(2 * at.size).view(-1, 2)[:, 0] // 2],
        "a range that is longer than the sequence",
    ),
    "from_one": (lambda at: at.x + at.table[torch.arange(1, at.size + 1)], "from something other than 0"),
    "by_two": (lambda at: at.x + at.table[torch.arange(0, 2 * at.size, 2)], "from something other than 0"),
    "backwards": (lambda at: at.x + at.table[at.size - at.row], "computed from the number of tokens"),
    "counted": (lambda at: at.x + at.table[torch.ones_like(at.ids).cumsum(-1)], "sums up along"),
    "several_rows": (lambda at: torch.cat([at.x, at.x]), r"not \[1, S, V\]"),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {name: lambda at, f=f: _attended(at, f(at)) for name, f in POSITIONS.items()}
    functions |= {name: lambda at, f=f: f(at) + 0 * _attended(at, at.x) for name, (f, _) in REFUSED.items()}
    members = {
        "qkv": nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
        "embedding": nn.Embedding(LONGEST, WIDTH),
        "table": nn.Parameter(drawn(LONGEST + 2, WIDTH)),
        "frequencies": drawn(WIDTH),
    }
    return Captured(Cases(functions, _prepare, **members))


@pytest.mark.parametrize("name", POSITIONS)
def test_packed_requests_have_their_own_positions(captured: Captured, name: str) -> None:
    """Chunks of two requests in one batch, neither starting at row 0 nor at position 0."""
    serve(captured, name, max_positions=LONGEST)


@pytest.mark.parametrize("name", POSITIONS)
def test_inputs_are_flat_and_positions_replace_numbers(captured: Captured, name: str) -> None:
    graph_module = captured.graph(name)
    ranges = count_ops(graph_module)["aten.arange"]
    run_passes(graph_module, stop_after="ragged_tokens", max_positions=LONGEST)
    inputs = placeholders(graph_module.graph)
    assert list(inputs) == ["input_ids", "positions"]
    assert all(value(node).dim() == 1 for node in inputs.values())
    assert count_ops(graph_module)["aten.arange"] == (ranges if name in ("own_entry", "both") else 0)
    ids = tokens(23)
    torch.testing.assert_close(run_on_prompt(graph_module, ids), captured.logits(name, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", [name for name in POSITIONS if name != "own_entry"])
def test_positions_need_not_start_at_zero(captured: Captured, name: str) -> None:
    """The rows 4 .. 9 of a prompt, alone, with their positions and without attention's help, are those of the whole."""
    graph_module = captured.graph(name)
    run_passes(graph_module, stop_after="ragged_tokens", max_positions=LONGEST)
    (attention,) = [node for node in graph_module.graph.nodes if "chunkc" in str(node.target)]
    graph_module.graph.output_node().args = (attention.args[2],)  # values: what tokens are before they meet
    graph_module.recompile()
    ids, positions = tokens(23), torch.arange(23)
    with torch.no_grad():
        whole = fx.Interpreter(graph_module).run(ids, positions)
        part = fx.Interpreter(graph_module).run(ids[4:10], positions[4:10])
        shifted = fx.Interpreter(graph_module).run(ids, positions + 7)
    torch.testing.assert_close(part, whole[:, :, 4:10])
    assert not torch.allclose(shifted[:, :, :4], whole[:, :, :4])


def test_report_counts_uses_and_the_pipeline_says_so(captured: Captured) -> None:
    from chunkc import compat
    from chunkc.passes.core import core_passes
    from chunkc.passes.pipeline import PassPipeline

    for name, uses in USES.items():
        with compat.one_graph_for_every_size():
            context = PassContext(max_positions=LONGEST)
            records = PassPipeline(core_passes()).run(captured.graph(name), context, stop_after="ragged_tokens")
        assert records[-1].report.matches == 2 + uses
        assert bool(records[-1].report.notes) == bool(uses)


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_positions_cannot_replace_are_refused(captured: Captured, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][1]) as caught:
        run_passes(captured.graph(name), max_positions=LONGEST)
    assert caught.value.op.startswith("aten.")


def test_a_later_pass_may_not_number_tokens(captured: Captured) -> None:
    class NumberTokens(GraphPass):
        name = "number_tokens"
        requires = ("ragged",)

        def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
            graph = graph_module.graph
            positions = placeholders(graph)["positions"]
            (lookup,) = [node for node in graph.nodes if node.target == aten.embedding.default and "1" in node.name]
            with graph.inserting_before(next(iter(positions.users))):
                size = graph.call_function(aten.sym_size.int, (positions, 0))
                numbers = graph.call_function(aten.arange.default, (size,))
                row = graph.call_function(aten.unsqueeze.default, (numbers, 0))
            lookup.args = (lookup.args[0], row)
            return PassReport(1)

    with pytest.raises(PassError, match=r"'number_tokens'.*'ragged' does not hold.*in the batch as its position"):
        run_passes(captured.graph("given"), extra=[NumberTokens()], max_positions=LONGEST)


def test_a_model_that_ignores_its_position_input() -> None:
    """Nothing tells export that there are as many positions as ids; in a batch there are."""
    table, qkv = nn.Parameter(drawn(LONGEST, WIDTH)), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    functions = {
        "alone": lambda at: _attended(at, at.x + at.table[at.row]),
        "by_rows": lambda at: _attended(at, at.x + at.table[at.row.view(at.size, -1)][:, 0]),
    }
    captured = Captured(Cases(functions, _prepare, table=table, qkv=qkv))
    for name in functions:
        serve(captured, name, max_positions=LONGEST)


def test_two_requests_at_different_places(captured: Captured) -> None:
    """Spelled out once: the batch [request 0 from 6, request 1 from 0] reads table rows 6, 7, 8, 0, 1."""
    graph_module = captured.graph("numbered")
    context = run_passes(graph_module, max_positions=LONGEST)
    prompts = [tokens(9), tokens(2, 1)]
    batches = Batches(graph_module, context, prompts)
    batches.step((0, 0, 6))
    logits = batches.step((0, 6, 9), (1, 0, 2))
    expected = [captured.logits("numbered", prompts[0])[6:], captured.logits("numbered", prompts[1])]
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-5, rtol=1e-5)
    assert VOCAB < LONGEST
