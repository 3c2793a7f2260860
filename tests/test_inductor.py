"""Graphs become a library that serves every size and returns no alias of an input; none takes another for itself."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from chunkc import compat, graph_library, inductor
from chunkc.parts import Part, cut
from chunkc.passes.propagate import propagate
from chunkc.passes.split_layers import _PART

aten = torch.ops.aten


def part_times(factor: float) -> Part:
    """Part 0 of a graph of two: from x [T, 4] and ids [T] to a multiple of x, views of it, and a view of ids."""
    environment = ShapeEnv()
    mode = FakeTensorMode(shape_env=environment)
    graph = fx.Graph()
    inputs = []
    for name, tensor in (("input_ids", torch.arange(13)), ("x", torch.randn(13, 4))):
        node = graph.placeholder(name)
        sizes = [DimDynamic.DYNAMIC] + [DimDynamic.STATIC] * (tensor.dim() - 1)
        node.meta["val"] = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(sizes))
        inputs.append(node)
    ids, x = inputs
    y = graph.call_function(aten.mul.Tensor, (x, factor))
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
    return cut(graph_module)[0]


#: what the parts multiply by; their kernels have the same name
FACTORS = {"twice": 2.0, "thrice": 3.0, "halved": 0.5}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """By name: (part, function, library), the first two of one library."""
    folder = tmp_path_factory.mktemp("libraries")
    with compat.one_graph_for_every_size(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(inductor, "_TOGETHER", 2)
        found = {name: part_times(factor) for name, factor in FACTORS.items()}
        waits = inductor.begin_libraries([part.graph_module for part in found.values()], list(found), folder)
    libraries = dict(zip(found, [wait() for wait in waits], strict=True))
    return {name: (part, graph_library.load(libraries[name], name), libraries[name]) for name, part in found.items()}


@pytest.fixture(scope="module")
def parts(compiled):
    return compiled["twice"][:2]


def test_graphs_share_a_library_and_each_computes_its_own(compiled):
    """Their kernels have one name, and C functions of a library share theirs."""
    x, ids = torch.randn(7, 4), torch.arange(7)
    for name, factor in FACTORS.items():
        part, function, _ = compiled[name]
        outputs = dict(
            zip(part.outputs, function(*[{"x": x, "input_ids": ids}[name] for name in part.inputs]), strict=True)
        )
        assert torch.equal(outputs["%unsqueeze_default"], factor * x[None])
    assert compiled["twice"][2] == compiled["thrice"][2] != compiled["halved"][2]


def test_a_library_lends_only_the_entry_points_that_it_has(compiled):
    with pytest.raises(ImportError):
        graph_library.load(compiled["halved"][2], "twice")


def test_sources_are_put_together_without_their_names_meeting():
    kernel = '#include <b.h>\nextern "C"  void  kernel(int64_t n);'
    source = inductor.together({"one": f"#include <a.h>\n{kernel}\nint x;", "two": f"{kernel}\nint y;"})
    code = "static  void  kernel(int64_t n);\nint {};".format
    pieces = ["#include <a.h>\n#include <b.h>"]
    pieces += [
        f"namespace {name} {{\n{code(var)}\n}} // namespace {name}" for name, var in (("one", "x"), ("two", "y"))
    ]
    assert source == "\n\n".join(pieces) + "\n"


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
        graph_library.load(tmp_path / "graph.so", "graph")


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


class Instructions:
    """Stands for Inductor's ``VecISA``."""

    def __init__(self, flags: str) -> None:
        self.flags = flags

    def build_arch_flags(self) -> str:
        return self.flags


def test_vector_instructions_that_the_compiler_lacks_are_not_used():
    from torch._inductor.cpu_vec_isa import VecISA

    before = VecISA.check_build
    with inductor._no_trials():
        assert VecISA.check_build(Instructions(""), "no C++ at all")
        assert not VecISA.check_build(Instructions("-mnone-such"), "")
    assert VecISA.check_build is before


def test_an_error_of_the_compiler_is_met_by_who_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(inductor, "together", lambda sources: "no C++ at all")
    with compat.one_graph_for_every_size():
        (wait,) = inductor.begin_libraries([part_times(2.0).graph_module], ["twice"], tmp_path)
    with pytest.raises(Exception, match="C\\+\\+ compile error"):
        wait()


def test_nothing_is_precompiled_and_inductor_stays_as_it_is(compiled, tmp_path, monkeypatch):
    from torch._inductor import codecache
    from torch._inductor.codecache import CppWrapperCodeCache

    assert "_precompile_header" in vars(codecache)
    monkeypatch.setattr(codecache, "_precompile_header", None)
    before = dict(vars(CppWrapperCodeCache))
    with compat.one_graph_for_every_size():
        (wait,) = inductor.begin_libraries([part_times(4.0).graph_module], ["four"], tmp_path)
    assert wait().parent == tmp_path
    assert vars(CppWrapperCodeCache) == before
