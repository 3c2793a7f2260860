"""propagate: values are recomputed where something changed and only there, and once for what is alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from chunkc.passes.fx_tools import aten, call, is_call, output_node, symbol_of, value
from chunkc.passes.propagate import propagate

from .graphs import WIDTH, Captured, Cases


def _chain(at: SimpleNamespace) -> torch.Tensor:
    return at.inner(at.x.tanh() * 2).exp().neg()


def _layers(at: SimpleNamespace) -> torch.Tensor:
    x = at.x
    for layer in at.layers:
        x = x + layer(x.tanh()).exp()
    return x


@pytest.fixture(scope="module")
def captured() -> Captured:
    cases = {
        "chain": _chain,
        "numbers": lambda at: (at.x * ((at.ids + 1) * 2)[..., None]).neg(),
        "layers": _layers,
    }
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return Captured(Cases(cases, inner=nn.Linear(WIDTH, WIDTH), layers=layers))


@pytest.fixture
def chain(captured: Captured) -> fx.GraphModule:
    graph_module = captured.graph("chain")
    propagate(graph_module)
    return graph_module


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that are run on fake values from here on."""
    names = []
    run_node = fx.Interpreter.run_node

    def counted(self: fx.Interpreter, n: fx.Node) -> object:
        if n.op == "call_function":
            names.append(str(n.target).split(".")[1])
        return run_node(self, n)

    monkeypatch.setattr(fx.Interpreter, "run_node", counted)
    return names


def _find(graph_module: fx.GraphModule, *targets: object) -> fx.Node:
    (node,) = [node for node in graph_module.graph.nodes if is_call(node, *targets)]
    return node


def test_nothing_changed_nothing_is_computed(chain: fx.GraphModule, computed: list[str]) -> None:
    before = [node.meta["val"] for node in chain.graph.nodes if node.op != "output"]
    propagate(chain)
    assert computed == []
    assert all(
        a is b for a, b in zip(before, (n.meta["val"] for n in chain.graph.nodes if n.op != "output"), strict=True)
    )


def test_the_first_time_everything_is_computed(captured: Captured, computed: list[str]) -> None:
    propagate(captured.graph("chain"))
    assert computed == ["embedding", "tanh", "mul", "linear", "exp", "neg"]


def test_a_change_that_keeps_the_shape_stops_at_the_node(chain: fx.GraphModule, computed: list[str]) -> None:
    node = _find(chain, aten.tanh)
    node.target = aten.sin.default
    propagate(chain)
    assert computed == ["sin"]


def test_a_change_of_shape_goes_as_far_as_it_matters(chain: fx.GraphModule, computed: list[str]) -> None:
    node = _find(chain, aten.exp)
    with chain.graph.inserting_after(node):
        wider = call(chain.graph, aten.repeat.default, node, [1, 1, 2], like=node)
    node.replace_all_uses_with(wider, delete_user_cb=lambda user: user is not wider)
    propagate(chain)
    assert computed == ["repeat", "neg"]
    assert value(output_node(chain.graph)).shape[-1] == 2 * WIDTH


def test_a_change_of_dtype_is_seen_through(chain: fx.GraphModule, computed: list[str]) -> None:
    node = _find(chain, aten.tanh)
    with chain.graph.inserting_after(node):
        double = call(chain.graph, aten._to_copy.default, node, like=node, dtype=torch.float64)
    product = _find(chain, aten.mul)
    product.replace_input_with(node, double)
    propagate(chain)
    assert computed[:3] == ["_to_copy", "mul", "linear"]
    assert value(product).dtype == torch.float64


def test_equal_arguments_of_other_kinds_are_other_arguments(captured: Captured) -> None:
    """1 == 1.0 == True, but ids + 1.0 is a float."""
    graph_module = captured.graph("numbers")
    propagate(graph_module)
    node = _find(graph_module, aten.add)
    assert value(node).dtype == torch.int64
    node.args = (node.args[0], 1.0)
    propagate(graph_module)
    assert value(node).dtype == torch.float32


def test_a_parameter_that_was_exchanged_is_seen(captured: Captured) -> None:
    graph_module = captured.graph("chain")
    propagate(graph_module)
    linear = _find(graph_module, aten.linear)
    owner, _, name = linear.args[1].target.rpartition(".")
    bias = linear.args[2].target.rpartition(".")[2]
    module = graph_module.get_submodule(owner)
    setattr(module, name, nn.Parameter(torch.zeros(5, WIDTH)))
    setattr(module, bias, nn.Parameter(torch.zeros(5)))
    propagate(graph_module)
    assert value(output_node(graph_module.graph)).shape[-1] == 5


def test_layers_that_are_alike_are_computed_once(captured: Captured, computed: list[str]) -> None:
    graph_module = captured.graph("layers")
    propagate(graph_module)
    assert computed == ["embedding", "tanh", "linear", "exp", "add"]
    sums = [value(node) for node in graph_module.graph.nodes if is_call(node, aten.add)]
    assert len(sums) == 3 and sums[0] is sums[1] is sums[2]


def test_a_layer_that_is_changed_is_unlike_the_others(captured: Captured, computed: list[str]) -> None:
    graph_module = captured.graph("layers")
    propagate(graph_module)
    computed.clear()
    second = [node for node in graph_module.graph.nodes if is_call(node, aten.tanh)][1]
    second.target = aten.sin.default
    with graph_module.graph.inserting_after(second):
        double = call(graph_module.graph, aten._to_copy.default, second, like=second, dtype=torch.float64)
    second.replace_all_uses_with(double, delete_user_cb=lambda user: user is not double)
    linear = next(iter(double.users))
    with graph_module.graph.inserting_after(double):
        back = call(graph_module.graph, aten._to_copy.default, double, like=second, dtype=torch.float32)
    linear.replace_input_with(double, back)
    propagate(graph_module)
    assert computed == ["sin", "_to_copy", "_to_copy", "linear"]  # which has another argument; nothing that follows
    assert value(double).dtype == torch.float64


def test_sizes_that_depend_on_numbers_are_nobody_elses(captured: Captured) -> None:
    """How many tokens an expert gets differs between layers whose values are alike."""
    graph_module = captured.graph("layers")
    graph = graph_module.graph
    for tanh in [node for node in graph.nodes if is_call(node, aten.tanh)]:
        with graph.inserting_after(tanh):
            call(graph, aten.nonzero.default, tanh, like=tanh)
    propagate(graph_module)
    counts = {symbol_of(value(node).shape[0]) for node in graph.nodes if is_call(node, aten.nonzero)}
    assert len(counts) == 3
