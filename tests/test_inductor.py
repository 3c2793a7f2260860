"""A graph becomes one library that serves every size and returns no alias of an input."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from chunkc import compat, graph_library, inductor
from chunkc.parts import cut
from chunkc.passes.propagate import propagate
from chunkc.passes.split_layers import _PART

aten = torch.ops.aten


@pytest.fixture(scope="module")
def parts():
    """Part 0 of a graph of two: from x [T, 4] and ids [T] to a sum, views of it, and a view of ids."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    graph = fx.Graph()
    with compat.one_graph_for_every_size():
        inputs = []
        for name, tensor in (("input_ids", torch.arange(13)), ("x", torch.randn(13, 4))):
            node = graph.placeholder(name)
            sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (tensor.dim() - 1)
            node.meta["val"] = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))
            inputs.append(node)
        ids, x = inputs
        y = graph.call_function(aten.mul.Tensor, (x, 2.0))
        row = graph.call_function(aten.unsqueeze.default, (y, 0))
        turned = graph.call_function(aten.transpose.int, (y, 0, 1))
        column = graph.call_function(aten.unsqueeze.default, (ids, 1))
        last = [graph.call_function(aten.sum.default, (node,)) for node in (row, turned, column)]
        total = graph.call_function(aten.add.Tensor, (last[0], last[1]))
        total = graph.call_function(aten.add.Tensor, (total, last[2]))
        graph.output(total)
        for node in graph.nodes:
            node.meta[_PART] = int(node in (*last, total))
        graph_module = fx.GraphModule({}, graph)
        propagate(graph_module)
        found = cut(graph_module)
        library = inductor.compile_to_libraries([found[0].graph_module])[0]
    return found[0], graph_library.load(library)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_one_library_serves_every_size(parts, rows):
    part, function = parts
    x, ids = torch.randn(rows, 4), torch.arange(rows)
    outputs = dict(
        zip(part.outputs, function(*[{"x": x, "input_ids": ids}[name] for name in part.inputs]), strict=True)
    )
    row, turned, column = (outputs[name] for name in ("%unsqueeze_default", "%transpose_int", "%unsqueeze_default_1"))
    assert torch.equal(row, 2 * x[None])
    assert torch.equal(turned, 2 * x.T)
    assert torch.equal(column, ids[:, None])


def test_no_output_is_an_alias_of_an_input(parts):
    part, function = parts
    inputs = {"x": torch.randn(5, 4), "input_ids": torch.arange(5)}
    outputs = function(*[inputs[name] for name in part.inputs])
    storages = {tensor.untyped_storage().data_ptr() for tensor in inputs.values()}
    assert not storages & {output.untyped_storage().data_ptr() for output in outputs}


def test_what_is_no_library_is_an_import_error(tmp_path):
    (tmp_path / "graph.so").write_bytes(b"no library")
    with pytest.raises(ImportError):
        graph_library.load(tmp_path / "graph.so")


def test_what_decides_whether_a_library_fits_is_not_where_inductor_keeps_its_own(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/somewhere")
    here = graph_library.environment()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert graph_library.environment() == here
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    assert graph_library.environment() != here


@pytest.mark.parametrize("told", [None, True, False])
def test_vector_instructions_are_not_tried_but_what_the_user_says_of_them_stays(told):
    from torch._inductor import config

    with config.patch({"cpp.vec_isa_ok": told}):
        with inductor._no_trials():
            assert config.cpp.vec_isa_ok is (True if told is None else told)
        assert config.cpp.vec_isa_ok is told


def test_graphs_include_what_is_precompiled_and_inductor_stays_as_it_is(parts):
    from torch._inductor.codecache import CppWrapperCodeCache

    before = dict(vars(CppWrapperCodeCache))
    headers = inductor._libraries()._get_uncompiled_header("cpu")
    text = Path(headers).read_text()
    assert all(f"<torch/csrc/inductor/{name}.h>" in text for name in ("cpp_wrapper/cpu", "cpp_prefix"))
    inductor.prepare_compiler()
    assert vars(CppWrapperCodeCache) == before
    assert CppWrapperCodeCache._get_uncompiled_header("cpu") != headers
