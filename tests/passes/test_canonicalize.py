"""canonicalize: what changes nothing goes away, what is equal becomes one, and nothing else happens."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from chunkc.errors import PassError
from chunkc.passes.base import PassContext
from chunkc.passes.canonicalize import Canonicalize, check_canonical
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import aten, call, output_node

from .graphs import WIDTH, Captured, Cases, count_ops, drawn, refused, run_pass, tokens


def _same(at: SimpleNamespace) -> torch.Tensor:
    """A dozen ways of doing nothing."""
    x = at.x.to(torch.float32).clone().contiguous().detach()
    size = x.shape[1]
    x = x.view(1, size, WIDTH).reshape(1, size, WIDTH).expand(1, size, WIDTH)[:, :, :]
    x = F.dropout(F.dropout(x, 0.5, training=False), 0.0)
    return x.type_as(at.x) * 2


def _dead(at: SimpleNamespace) -> torch.Tensor:
    at.x.softmax(-1).sum()
    return at.x * 2


#: name: (function, operators before that are gone or fewer after, operators after)
REWRITTEN = {
    "does_nothing": (_same, {}, {"aten.mul": 1}),
    "dead": (_dead, {}, {"aten.mul": 1}),
    "equal": (lambda at: at.x.tanh() + at.x.tanh().exp() + at.x.tanh().exp(), {"aten.tanh": 3}, {"aten.tanh": 1}),
    "equal_slices": (lambda at: at.x[..., :4].repeat(1, 1, 3) * at.x[..., :4].repeat(1, 1, 3), {}, {"aten.repeat": 1}),
    "view": (lambda at: at.x.view(1, -1, 3, 4).tanh().view(1, -1, WIDTH), {}, {"aten.reshape": 2, "aten.view": 0}),
    "transposed_weight": (lambda at: at.x @ at.square.T, {"aten.matmul": 1}, {"aten.linear": 1, "aten.matmul": 0}),
    "squeeze": (lambda at: at.x * (at.x @ at.square[:, :1]).squeeze()[None, :, None], {}, {"aten.squeeze": 1}),
    "in_place": (lambda at: at.x.clone().mul_(2).add_(1), {}, {"aten.mul": 1, "aten.add": 1}),
    "assertion": (lambda at: at.x.to(torch.float64).to(torch.float32), {}, {"aten._assert_tensor_metadata": 0}),
}
#: name: (function, operators that must all be there afterwards)
KEPT = {
    "other_dtype": (lambda at: at.x.to(torch.bfloat16).to(torch.float32), {"aten._to_copy": 2}),
    "other_size": (lambda at: at.x[..., 1:].repeat_interleave(2, -1)[..., :WIDTH], {"aten.slice": 2}),
    "same_size_by_chance": (lambda at: at.x.transpose(1, 2).reshape(1, -1, WIDTH).tanh(), {"aten.reshape": 1}),
    "expanded": (lambda at: at.x + at.x[..., :1].expand(-1, -1, WIDTH), {"aten.expand": 1}),
    "other_number": (lambda at: at.x * 2 + at.x * 3, {"aten.mul": 2}),
    "integer_and_float": (
        lambda at: at.x * ((at.ids + 1) // 2)[..., None] + at.x * ((at.ids + 1.0) // 2)[..., None],
        {"aten.mul": 2, "aten.floor_divide": 2},
    ),
    "keyword": (lambda at: at.x.sum(-1, keepdim=True) + at.x.sum(-1)[..., None] + at.x, {"aten.sum": 2}),
    "other_weight": (lambda at: at.x @ at.square + at.x @ at.square.T, {"aten.matmul": 1, "aten.linear": 1}),
    "transposed_tokens": (lambda at: at.x @ (at.x.transpose(1, 2) @ at.x), {"aten.matmul": 2}),
    "bits": (lambda at: at.x.view(torch.int32).view(torch.float32).tanh(), {"aten.view": 2}),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {name: case[0] for name, case in {**REWRITTEN, **KEPT}.items()}
    functions["random"] = lambda at: at.x + torch.rand_like(at.x)
    functions["dropout"] = lambda at: F.dropout(at.x, 0.5, training=True)
    return Captured(Cases(functions, square=nn.Parameter(drawn(WIDTH, WIDTH))))


def _check_numbers(captured: Captured, graph_module: fx.GraphModule, name: str) -> None:
    whole = captured.logits(name, tokens(11))
    torch.testing.assert_close(run_on_prompt(graph_module, tokens(11)), whole)
    if name in REWRITTEN:  # each treats tokens alone; the graph must be right for one token as for many
        torch.testing.assert_close(run_on_prompt(graph_module, tokens(11)[:1]), whole[:1])


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewrites(captured: Captured, name: str) -> None:
    _, before, after = REWRITTEN[name]
    graph_module = captured.graph(name)
    counts = count_ops(graph_module)
    assert {op: counts[op] for op in before} == before
    run_pass(Canonicalize(), graph_module)
    counts = count_ops(graph_module)
    assert {op: counts[op] for op in after} == after
    if name in ("does_nothing", "dead"):
        assert set(counts) == {"aten.embedding", "aten.mul"}
    check_canonical(graph_module, PassContext())
    _check_numbers(captured, graph_module, name)


@pytest.mark.parametrize("name", KEPT)
def test_what_does_something_is_kept(captured: Captured, name: str) -> None:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    counts = count_ops(graph_module)
    assert {op: counts[op] for op in KEPT[name][1]} == KEPT[name][1]
    _check_numbers(captured, graph_module, name)


@pytest.mark.parametrize("name", [*REWRITTEN, *KEPT])
def test_a_second_time_finds_nothing(captured: Captured, name: str) -> None:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    counts = count_ops(graph_module)
    assert run_pass(Canonicalize(), graph_module).matches == 0
    assert count_ops(graph_module) == counts


@pytest.mark.parametrize(("name", "op"), [("random", "aten.rand_like"), ("dropout", "aten.")])
def test_random_numbers_are_refused(captured: Captured, name: str, op: str) -> None:
    with refused("draws random numbers", op=op, module=name):
        run_pass(Canonicalize(), captured.graph(name))


def test_writing_into_an_input_is_refused(captured: Captured) -> None:
    graph_module = captured.graph("dead")
    output = output_node(graph_module.graph)
    with graph_module.graph.inserting_after(output):
        written = call(graph_module.graph, aten.add_.Tensor, output, 1, like=output)
    output.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
    with refused("writes into one of its inputs", op="aten.add_.Tensor", module="dead"):
        run_pass(Canonicalize(), graph_module)


def test_a_module_call_is_refused(captured: Captured) -> None:
    graph_module = captured.graph("dead")
    graph_module.add_module("inner", nn.Identity())
    output = output_node(graph_module.graph)
    with graph_module.graph.inserting_after(output):
        called = graph_module.graph.call_module("inner", (output,))
    output.replace_all_uses_with(called, delete_user_cb=lambda user: user is not called)
    with refused("calls a module", op="inner", module=""):
        run_pass(Canonicalize(), graph_module)


def _insert_view(graph: fx.Graph, output: fx.Node) -> fx.Node:
    return call(graph, aten.view.default, output, [1, -1, WIDTH], like=output)


def _insert_assertion(graph: fx.Graph, output: fx.Node) -> fx.Node:
    call(graph, aten._assert_tensor_metadata.default, output, like=output)
    return call(graph, aten.neg.default, output, like=output)


@pytest.mark.parametrize(("insert", "reason"), [(_insert_view, "is a view"), (_insert_assertion, "is an assertion")])
def test_the_fact_is_checked(captured: Captured, insert: Callable[[fx.Graph, fx.Node], fx.Node], reason: str) -> None:
    graph_module = captured.graph("dead")
    run_pass(Canonicalize(), graph_module)
    check_canonical(graph_module, PassContext())
    output = output_node(graph_module.graph)
    with graph_module.graph.inserting_before(graph_module.graph.output_node()):
        graph_module.graph.output_node().args = (insert(graph_module.graph, output),)
    with pytest.raises(PassError, match=reason):
        check_canonical(graph_module, PassContext())
