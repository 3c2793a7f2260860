"""A model that was prepared before is served from what is on disk: nothing is captured or compiled again."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from pathlib import Path

import pytest
from serving import assert_served_alike
from tiny import build, greedy_references
from transformers import PreTrainedModel

import chunkc
from chunkc import artifacts, graph_library, inductor, preparation
from chunkc.lower import compile_counter
from chunkc.passes.base import GraphPass, PassReport
from chunkc.runtime.engine import Engine

LAYERS = {"gpt2": "n_layer"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(artifacts, "cache_dir", lambda: tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    """What a first start of the tiny llama keeps; copied by the tests that want one."""
    folder = tmp_path_factory.mktemp("kept")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(artifacts, "cache_dir", lambda: folder)
        start(build("llama"))
    return folder


def start(model: PreTrainedModel, **options) -> Engine:
    return chunkc.compile(model, num_pages=32, **options)


def source(engine: Engine) -> str:
    return engine.explain().split()[2:4][1]


def only(folder: Path, kind: str) -> Path:
    (found,) = folder.glob(f"{kind}-*")
    return found


@pytest.fixture
def warm(kept, folder) -> Path:
    """The folder after a first start of the tiny llama."""
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize(
    "name",
    ["gemma3_text", pytest.param("gpt2", marks=pytest.mark.slow), pytest.param("gpt_oss", marks=pytest.mark.slow)],
)
def test_a_second_start_neither_captures_nor_compiles(name, monkeypatch):
    """With other weights: nothing of the first model's is served."""
    start(build(name, seed=1))
    before = compile_counter.graphs
    monkeypatch.setattr(preparation, "rewrite", None)
    monkeypatch.setattr(inductor, "begin_libraries", None)
    model = build(name, seed=2)
    engine = start(model)
    assert source(engine) == "cache"
    assert "as were the passes below" in engine.explain() and "recognize_attention" in engine.explain()
    assert compile_counter.graphs == before
    assert_served_alike(engine, greedy_references(model, (1, 9, 30), 6), steps_between=2)


def test_a_graph_that_is_gone_is_compiled_again(warm):
    shutil.rmtree(next(iter(warm.glob("graph-*"))))
    model = build("llama")
    before = compile_counter.graphs
    engine = start(model)
    assert source(engine) == "model"
    assert compile_counter.graphs == before + 1
    assert_served_alike(engine, greedy_references(model, (9,), 5))
    assert source(start(model)) == "cache"


def test_the_graphs_of_a_first_start_share_one_library(folder):
    start(build("llama"))
    libraries = list(folder.glob("graph-*/graph.so"))
    assert len(libraries) > 1
    assert len({library.stat().st_ino for library in libraries}) == 1


def replace_library(library: Path) -> None:
    """One entry's, as a tool would that restores files."""
    library.unlink()
    library.write_bytes(b"\x7fELF")


def overwrite_library(library: Path) -> None:
    """That of all entries linked to it."""
    library.write_bytes(b"\x7fELF")


@pytest.mark.parametrize("harm", [replace_library, overwrite_library])
def test_a_damaged_library_is_said_and_compiled_again(warm, harm):
    library, *others = warm.glob("graph-*/graph.so")
    for other in others:  # as a first start leaves them
        other.unlink()
        other.hardlink_to(library)
    harm(library)
    entries = 1 + len(others) * (harm is overwrite_library)
    model = build("llama")
    before = compile_counter.graphs
    with pytest.warns(RuntimeWarning, match=r"is damaged \(graph.so\); it is made again") as warned:
        engine = start(model)
    assert len([w for w in warned if "is damaged" in str(w.message)]) == entries
    assert compile_counter.graphs == before + entries
    assert_served_alike(engine, greedy_references(model, (9,), 5))


def test_the_library_of_another_graph_is_not_taken_for_it(warm):
    """Even where its hash is right: an entry point has the name of its key."""
    entry = next(iter(warm.glob("graph-*")))
    other = artifacts.store("graph", "0" * 32, {"graph.so": entry / "graph.so"}, {})
    assert graph_library.find(entry.name.removeprefix("graph-")) is not None
    with pytest.warns(UserWarning, match="does not load .* it is made again"):
        assert graph_library.find("0" * 32) is None
    assert not other.folder.exists()


def rewrite_entry(folder: Path, change) -> None:
    """Change the model's data and make its hash right again."""
    index = json.loads((folder / "entry.json").read_text())
    data = json.loads((folder / "model.json").read_text())
    change(data)
    text = json.dumps(data)
    index["files"]["model.json"] = hashlib.sha256(text.encode()).hexdigest()
    (folder / "model.json").write_text(text)
    (folder / "entry.json").write_text(json.dumps(index))


def swap_weights(data) -> None:
    made = [how for how in data["made"].values() if how["kind"] == "concatenated" and len(how["parts"]) == 2]
    for how in made:  # gate and up
        how["parts"].reverse()


def test_what_fails_the_check_is_said_and_made_again(warm):
    rewrite_entry(only(warm, "model"), swap_weights)
    model = build("llama")
    with pytest.warns(RuntimeWarning, match="fails the check .* it is made again"):
        engine = start(model)
    assert source(engine) == "model"
    assert_served_alike(engine, greedy_references(model, (9,), 5))
    assert source(start(model)) == "cache"


def forget_field(data) -> None:
    del data["program"]


def test_an_entry_of_another_shape_is_not_used(warm):
    rewrite_entry(only(warm, "model"), forget_field)
    assert source(start(build("llama"))) == "model"


class Nothing(GraphPass):
    name = "nothing"

    def run(self, graph_module, context):
        return PassReport(0)


def test_other_passes_are_not_taken_from_the_cache(warm):
    engine = start(build("llama"), passes=[Nothing()])
    assert source(engine) == "model"
    assert "nothing" in engine.explain()
    assert len(list(warm.glob("model-*"))) == 1


def test_a_changed_model_is_not_taken_from_the_cache(warm):
    model = build("llama")
    model.model.layers[0].self_attn.scaling *= 3
    engine = start(model)
    assert source(engine) == "model"


def test_a_model_of_unknown_code_is_captured_every_time(warm):
    model = build("llama")
    model.model.norm.factor = object()
    for _ in range(2):
        engine = start(model)
        assert source(engine) == "model"
    assert len(list(warm.glob("model-*"))) == 1


def test_what_was_not_checked_is_not_kept(folder):
    start(build("llama"), verify="off")
    assert not list(folder.glob("model-*"))


def test_nothing_is_kept_of_a_model_in_eager_mode(folder):
    start(build("llama"), mode="eager")
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said_and_the_model_served(folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setattr(artifacts, "cache_dir", lambda: folder / "file")
    model = build("llama")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        engine = start(model)
    assert any("CHUNKC_CACHE_DIR" in str(warning.message) for warning in warned)
    assert_served_alike(engine, greedy_references(model, (9,), 5))
