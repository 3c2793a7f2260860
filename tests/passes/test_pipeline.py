"""The pipeline: order from facts, and no pass is believed."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from chunkc import compat
from chunkc.errors import PassError, UnsupportedModelError
from chunkc.passes import facts
from chunkc.passes.base import GraphPass, PassContext, PassReport, Skipped
from chunkc.passes.bisect import bisect
from chunkc.passes.core import core_passes
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.facts import check_fact, register_fact, require
from chunkc.passes.fx_tools import aten, call, is_call, output_node, placeholders, value
from chunkc.passes.order import order_passes
from chunkc.passes.pipeline import DumpGraphs, PassPipeline, Snapshots

from .graphs import WIDTH, Captured, Cases, count_ops, huggingface, reference_logits, tokens

CORE = [graph_pass.name for graph_pass in core_passes()]


def _pass(name: str, run: Any = None, **attributes: Any) -> GraphPass:
    """A pass that does ``run(graph)``; it reports one match unless ``run`` returns a report."""

    def run_it(self: GraphPass, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        report = run(graph_module.graph) if run is not None else None
        return report if isinstance(report, PassReport) else PassReport(1)

    return dataclass(frozen=True)(type(name, (GraphPass,), {"name": name, "run": run_it, **attributes}))()


def _attended(at: SimpleNamespace) -> torch.Tensor:
    q, k, v = (linear(at.x)[:, None] for linear in at.qkv)
    return at.x + F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]


@pytest.fixture(scope="module")
def captured() -> Captured:
    qkv = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return Captured(Cases({"model": _attended, "plain": lambda at: at.x.tanh() * 2 + 1}, qkv=qkv))


@pytest.fixture(autouse=True)
def own_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts that a test registers are gone after it."""
    monkeypatch.setattr(facts, "_CHECKERS", dict(facts._CHECKERS))


@pytest.fixture
def holds() -> Iterator[dict[str, bool]]:
    """Facts a, b and c, and whether they hold."""
    state = dict.fromkeys("abc", True)
    for name in state:
        register_fact(name)(lambda graph_module, context, name=name: require(state[name], f"{name} is broken"))
    yield state


def _run(passes: list[GraphPass], graph_module: fx.GraphModule, **options: Any) -> tuple[list[Any], PassContext]:
    context = PassContext(max_positions=64)
    with compat.one_graph_for_every_size():
        return PassPipeline(passes).run(graph_module, context, **options), context


# order


def _names(passes: list[GraphPass]) -> list[str]:
    return [graph_pass.name for graph_pass in order_passes(passes)]


def test_requires_and_ensures_decide_the_order() -> None:
    last = _pass("last", requires=("b",))
    middle = _pass("middle", requires=("a",), ensures=("b",))
    first, other = _pass("first", ensures=("a",)), _pass("other", ensures=("a",))
    assert _names([last, middle, first, other]) == ["first", "other", "middle", "last"]
    assert _names([last, other, first, middle]) == ["other", "first", "middle", "last"]  # else as given


def test_core_passes_are_in_order_however_they_are_given() -> None:
    assert _names(core_passes()) == CORE
    assert _names(core_passes()[::-1])[0] == "canonicalize"
    assert set(_names(core_passes()[::-1])) == set(CORE)


def test_before_puts_a_pass_earlier() -> None:
    assert _names([*core_passes(), _pass("mine", before=("recognize_attention",))]).index("mine") < 2
    with pytest.raises(PassError, match=r"'mine'.*before 'nobody', which is not there"):
        order_passes([_pass("mine", before=("nobody",))])


def test_a_cycle_is_named() -> None:
    ring = [_pass(name, requires=(fact,), ensures=(made,)) for name, fact, made in ("xac", "yba", "zcb")]
    with pytest.raises(PassError) as caught:
        order_passes([_pass("outside"), *ring])
    path = str(caught.value).rpartition(": ")[2].split(" -> ")
    assert path[0] == path[-1] and sorted(path[1:]) == ["x", "y", "z"]
    with pytest.raises(PassError, match="own -> own"):
        order_passes([_pass("own", requires=("a",), ensures=("a",))])
    with pytest.raises(PassError, match="wait for each other"):
        order_passes([_pass("p", ensures=("a",)), _pass("q", requires=("a",), before=("p",))])


def test_a_missing_fact_is_named() -> None:
    with pytest.raises(PassError, match=r"'mine'.*'no_such_fact', which no pass ensures"):
        order_passes([*core_passes(), _pass("mine", requires=("no_such_fact",))])


def test_two_passes_of_one_name_are_an_error() -> None:
    with pytest.raises(PassError, match=r"'canonicalize'.*two passes of this name"):
        PassPipeline([*core_passes(), _pass("canonicalize")])


def test_a_fact_needs_a_checker(captured: Captured) -> None:
    with pytest.raises(PassError, match=r"'mine'.*ensures 'unchecked', which has no checker"):
        PassPipeline([_pass("mine", ensures=("unchecked",))])
    with pytest.raises(PassError, match=r"'unchecked' has no checker"):
        check_fact("unchecked", captured.graph("plain"), PassContext())


# honesty


def test_records_say_what_each_pass_did(captured: Captured) -> None:
    records, context = _run(core_passes(), captured.graph("model"))
    assert [record.name for record in records] == CORE
    for record, following in itertools.pairwise(records):
        assert record.nodes_after == following.nodes_before
        assert record.seconds > 0 and record.check_seconds > 0
    assert context.facts == {fact for graph_pass in core_passes() for fact in graph_pass.ensures}


def _use_before_definition(graph: fx.Graph) -> None:
    first = next(node for node in graph.nodes if node.op == "call_function")
    first.args = (next(node for node in graph.nodes if is_call(node, aten.add)), *first.args[1:])


def _wrong_shape(graph: fx.Graph) -> None:
    (add,) = [node for node in graph.nodes if is_call(node, aten.add)]
    with graph.inserting_before(add):
        part = call(graph, aten.slice.Tensor, add.args[0], -1, 0, WIDTH - 1, like=add)
        full = call(graph, aten.add.Tensor, part, add.args[0], like=add)
    add.replace_all_uses_with(full)


def _no_such_attribute(graph: fx.Graph) -> None:
    tanh = next(node for node in graph.nodes if is_call(node, aten.tanh))
    with graph.inserting_before(tanh):
        tanh.args = (graph.create_node("get_attr", "nowhere"),)


@pytest.mark.parametrize("harm", [_use_before_definition, _wrong_shape, _no_such_attribute])
def test_a_pass_that_breaks_the_graph_is_named(captured: Captured, harm: Any) -> None:
    passes = [_pass("harmless"), _pass("harmful", harm), _pass("never_reached", lambda graph: pytest.fail("reached"))]
    with pytest.raises(PassError, match=r"'harmful': left a graph that does not run") as caught:
        _run(passes, captured.graph("plain"))
    assert caught.value.pass_name == "harmful"


def test_shapes_are_propagated_anew_for_the_next_pass(captured: Captured) -> None:
    seen = []

    def to_double(graph: fx.Graph) -> None:
        (tanh,) = [node for node in graph.nodes if is_call(node, aten.tanh)]
        with graph.inserting_before(tanh):
            tanh.args = (call(graph, aten._to_copy.default, tanh.args[0], like=tanh, dtype=torch.float64),)

    _run(
        [_pass("one", to_double), _pass("two", lambda g: seen.append(value(output_node(g)).dtype))],
        captured.graph("plain"),
    )
    assert seen == [torch.float64]


def test_a_claimed_fact_that_does_not_hold_is_caught(captured: Captured, holds: dict[str, bool]) -> None:
    holds["a"] = False
    with pytest.raises(PassError, match=r"'liar': after it, the fact 'a' does not hold: a is broken"):
        _run([_pass("liar", ensures=("a",))], captured.graph("plain"))


def test_a_later_pass_that_breaks_an_earlier_fact_is_caught(captured: Captured, holds: dict[str, bool]) -> None:
    breaks = _pass("breaks", lambda graph: holds.update(a=False), requires=("b",))
    passes = [_pass("first", ensures=("a",)), _pass("second", requires=("a",), ensures=("b",)), breaks]
    with pytest.raises(PassError, match=r"'breaks': after it, the fact 'a' does not hold"):
        _run(passes, captured.graph("plain"))


def test_a_user_pass_that_breaks_a_core_fact_is_caught(captured: Captured) -> None:
    def mix(graph: fx.Graph) -> None:
        output = output_node(graph)
        with graph.inserting_after(output):
            mean = call(graph, aten.mean.dim, output, [0], True, like=output)
        with graph.inserting_after(mean):
            mixed = call(graph, aten.sub.Tensor, output, mean, like=output)
        graph.output_node().args = (mixed,)

    mine = _pass("mine", mix, requires=("ragged",))
    with pytest.raises(PassError, match=r"'mine'.*'token_parallel'.*reduces.*aten\.mean\.dim"):
        _run([*core_passes(), mine], captured.graph("model"))


def test_zero_matches_where_some_were_expected_are_an_error(captured: Captured) -> None:
    nothing = PassReport(0, skipped=(Skipped("layers.3", "its weight is computed"),))
    with pytest.raises(PassError, match=r"'mine': found nothing.*layers\.3: its weight is computed"):
        _run([_pass("mine", lambda graph: nothing, expects_matches=True)], captured.graph("plain"))
    with pytest.raises(PassError, match=r"'mine': found nothing.*no candidate was seen"):
        _run([_pass("mine", lambda graph: PassReport(0), expects_matches=True)], captured.graph("plain"))
    records, _ = _run([_pass("mine", lambda graph: nothing)], captured.graph("plain"))  # else it is only told
    assert records[0].report == nothing


def test_a_refusal_comes_through_as_it_is(captured: Captured) -> None:
    def refuse(graph: fx.Graph) -> None:
        raise UnsupportedModelError("a reason", op="aten.tanh.default", module="plain")

    with pytest.raises(UnsupportedModelError, match="a reason") as caught:
        _run([_pass("mine", refuse)], captured.graph("plain"))
    assert caught.value.module == "plain"


def test_a_pass_that_fails_or_reports_nothing_is_named(captured: Captured) -> None:
    with pytest.raises(PassError, match=r"'mine': failed .KeyError: 'x'") as caught:
        _run([_pass("mine", lambda graph: {}["x"])], captured.graph("plain"))
    assert isinstance(caught.value.__cause__, KeyError)
    mute = dataclass(frozen=True)(
        type("mute", (GraphPass,), {"name": "mute", "run": lambda self, graph, context: None})
    )
    with pytest.raises(PassError, match=r"'mute': returned None instead of a PassReport"):
        _run([mute()], captured.graph("plain"))


# what people look at


@pytest.mark.parametrize("stop_after", CORE)
def test_stop_after(captured: Captured, stop_after: str) -> None:
    graph_module = captured.graph("model")
    records, context = _run(core_passes(), graph_module, stop_after=stop_after)
    assert [record.name for record in records] == CORE[: CORE.index(stop_after) + 1]
    ids = tokens(9)
    torch.testing.assert_close(run_on_prompt(graph_module, ids), captured.logits("model", ids), atol=1e-5, rtol=1e-5)
    assert ("paged" in context.facts) == (CORE.index(stop_after) >= CORE.index("page_attention"))


def test_stop_after_an_unknown_pass(captured: Captured) -> None:
    with pytest.raises(PassError, match=r"stop_after='nobody' names no pass; there are: canonicalize, .*gather_logits"):
        _run(core_passes(), captured.graph("model"), stop_after="nobody")


def test_snapshots_of_every_stage_run() -> None:
    """On a real model; the passes go on changing the graph and dropping weights, the snapshots stay."""
    model, graph_module = huggingface("gemma2")
    snapshots = Snapshots()
    _, context = _run(core_passes(), graph_module, callbacks=[snapshots])
    assert list(snapshots.graphs) == ["captured", *CORE]
    ids = tokens(17, vocab=211)
    expected = reference_logits(model, ids)
    for stage in snapshots.graphs.values():
        torch.testing.assert_close(run_on_prompt(stage, ids), expected, atol=1e-4, rtol=1e-4)
    assert list(placeholders(snapshots.graphs["captured"].graph)) == ["input_ids", "position_ids"]
    assert (
        count_ops(snapshots.graphs["canonicalize"])["aten.linear"]
        > count_ops(snapshots.graphs["fuse_linears"])["aten.linear"]
    )
    found = bisect(snapshots.graphs, ids, expected)
    assert found.culprit is None and [stage.name for stage in found.stages] == ["captured", *CORE]
    del context  # holds what packed weights are made of, until here


def test_dump_folder(captured: Captured, tmp_path: Path) -> None:
    folder = tmp_path / "graphs" / "model"
    _run(core_passes(), captured.graph("model"), callbacks=[DumpGraphs(folder)])
    stems = [f"{number:02d}_{name}" for number, name in enumerate(["captured", *CORE])]
    files = [f"{stem}.py" for stem in stems] + [f"{stem}.diff" for stem in stems[1:]]
    assert sorted(path.name for path in folder.iterdir()) == sorted(files)
    for stem in stems:
        ast.parse((folder / f"{stem}.py").read_text())
    assert "scaled_dot_product_attention" in (folder / "01_canonicalize.py").read_text()
    diff = (folder / "02_recognize_attention.diff").read_text()
    assert "--- before\n+++ after recognize_attention" in diff
    changed = [line for line in diff.splitlines() if line.startswith(("-", "+"))]
    assert any(line[0] == "-" and "scaled_dot_product_attention" in line for line in changed)
    assert any(line[0] == "+" and "chunkc.attention" in line for line in changed)
    assert (folder / "03_prove_token_parallel.diff").read_text() == ""  # an analysis changes nothing


def _break_scale(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if is_call(node, torch.ops.chunkc.mixed_attention):
            node.args = (*node.args[:13], node.args[13] * 1.5, *node.args[14:])


def _break_numbers(graph: fx.Graph) -> None:
    output = output_node(graph)
    with graph.inserting_after(output):
        graph.output_node().args = (call(graph, aten.log.default, output, like=output),)


@pytest.mark.parametrize(
    ("harm", "requires", "before"),
    [
        (_break_scale, "paged", "gather_logits"),
        (_break_numbers, "ragged", "fuse_linears"),
        (None, "ragged", "fuse_linears"),
    ],
)
def test_bisect_finds_the_pass_that_breaks_the_numbers(
    captured: Captured, harm: Any, requires: str, before: str
) -> None:
    """One pass uses another scale, which no fact forbids; one makes NaN, which is not within any tolerance."""
    passes = [*core_passes(), _pass("suspect", harm, requires=(requires,), before=(before,))]
    snapshots = Snapshots()
    _, context = _run(passes, captured.graph("model"), callbacks=[snapshots])
    ids = tokens(11)
    found = bisect(snapshots.graphs, ids, captured.logits("model", ids))
    assert found.culprit == (None if harm is None else "suspect")
    marked = [line for line in str(found).splitlines() if "<- first" in line]
    assert [line.split()[0] for line in marked] == ([] if harm is None else ["suspect"])
    if harm is not None:
        place = [stage.name for stage in found.stages].index("suspect")
        assert all(stage.error < 1e-4 for stage in found.stages[:place])
        assert not any(stage.error < 1e-3 for stage in found.stages[place:])
    del context
