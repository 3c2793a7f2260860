"""fx_tools: nodes know their modules, sizes and inputs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

from chunkc import compat
from chunkc.passes.attributes import attribute
from chunkc.passes.fx_tools import (
    add_placeholder,
    aten,
    call,
    fake_mode_of,
    is_call,
    module_path,
    new_size,
    op_name,
    output_node,
    placeholders,
    rank,
    refuse,
    same_size,
    symbol_of,
    value,
)
from chunkc.passes.propagate import propagate

from .graphs import WIDTH, Captured, Cases, huggingface


def _chain(at: SimpleNamespace) -> torch.Tensor:
    return at.inner(at.x.tanh() * 2).exp().neg()


@pytest.fixture(scope="module")
def captured() -> Captured:
    return Captured(Cases({"chain": _chain}, inner=nn.Linear(WIDTH, WIDTH)))


@pytest.fixture
def chain(captured: Captured) -> fx.GraphModule:
    graph_module = captured.graph("chain")
    propagate(graph_module)
    return graph_module


def _find(graph_module: fx.GraphModule, *targets: object) -> fx.Node:
    (node,) = [node for node in graph_module.graph.nodes if is_call(node, *targets)]
    return node


def test_sizes_stay_symbols(chain: fx.GraphModule) -> None:
    symbol = symbol_of(value(placeholders(chain.graph)["input_ids"]).shape[1])
    assert symbol is not None and symbol_of(WIDTH) is None
    assert all(symbol_of(value(node).shape[1]) == symbol for node in chain.graph.nodes if node.op == "call_function")


# where a node comes from


def test_module_paths_are_those_of_the_model(captured: Captured) -> None:
    graph = captured.graph("chain").graph
    paths = {str(node.target).split(".")[1]: module_path(node) for node in graph.nodes if node.op == "call_function"}
    assert paths == {
        "embedding": "embed",
        "tanh": "chain",
        "mul": "chain",
        "linear": "inner",
        "exp": "chain",
        "neg": "chain",
    }


def test_module_paths_of_a_real_model_name_its_modules() -> None:
    model, graph_module = huggingface("gemma2")
    modules = dict(model.named_modules())
    paths = [module_path(node) for node in graph_module.graph.nodes if node.op == "call_function"]
    assert set(paths) <= set(modules)
    linears = {module_path(node) for node in graph_module.graph.nodes if is_call(node, aten.linear)}
    assert linears == {path for path, module in modules.items() if isinstance(module, nn.Linear)}


def test_a_call_takes_its_origin_along(chain: fx.GraphModule) -> None:
    like = _find(chain, aten.linear)
    with chain.graph.inserting_after(like):
        new = call(chain.graph, aten.neg.default, like, like=like)
    assert module_path(new) == module_path(like) == "inner"
    error = refuse(new, "because", "Try something else.")
    assert (error.op, error.module, error.hint) == ("aten.neg.default", "inner", "Try something else.")
    assert str(error) == "because [op aten.neg.default in module inner]. Try something else."
    nowhere = chain.graph.call_function(torch.sin, (new,))
    assert module_path(nowhere) == "" and "(root)" in str(refuse(nowhere, "because"))


# small things


def test_is_call_knows_overloads_packets_and_functions(chain: fx.GraphModule) -> None:
    node = _find(chain, aten.mul)
    assert is_call(node, aten.mul) and is_call(node, aten.mul.Tensor) and is_call(node, aten.add, aten.mul)
    assert not is_call(node, aten.mul.Scalar) and not is_call(node, aten.add)
    assert op_name(node) == "aten.mul.Tensor" and rank(node) == 3
    for other in ("aten.mul", None, 2, placeholders(chain.graph)["input_ids"]):
        assert not is_call(other, aten.mul)


def test_new_sizes_and_inputs(captured: Captured) -> None:
    graph = captured.graph("chain").graph
    with compat.one_graph_for_every_size():
        one, two = new_size(graph, "one", 5), new_size(graph, "two", 5)
        add_placeholder(graph, "first", (one, 3), torch.int32)
        node = add_placeholder(graph, "second", (two + 1,), torch.int64)
    assert list(placeholders(graph)) == ["input_ids", "position_ids", "first", "second"]
    assert symbol_of(one) != symbol_of(two)  # although both are 5 for now
    assert value(node).dtype == torch.int64 and symbol_of(value(node).shape[0]) == symbol_of(two) + 1
    assert value(node).fake_mode is fake_mode_of(graph)


def test_output_and_attributes(chain: fx.GraphModule) -> None:
    output = output_node(chain.graph)
    chain.graph.output_node().args = ((output,),)
    assert output_node(chain.graph) is output
    weight = _find(chain, aten.linear).args[1]
    assert attribute(chain, weight.target).shape == (WIDTH, WIDTH)
    assert value(7) == 7
    with pytest.raises(ValueError, match="no placeholder with a fake value"):
        fake_mode_of(fx.Graph())


def test_sizes_are_the_same_where_they_are_for_every_number_of_tokens(captured: Captured) -> None:
    size = value(placeholders(captured.graph("chain").graph)["input_ids"]).shape[1]
    assert same_size(size, size) and same_size(4, 4)
    assert same_size(size * size // size, size) and same_size(6 * size // 3, 2 * size)
    assert not same_size(size, 13) and not same_size(size // 2, size) and not same_size((size + 1) // 2 * 2, size)
    assert not same_size(size * size // (size + 1), size) and not same_size(3, 4)
