"""A folder of weights that was served before is served from what is on disk: without its model's code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from safetensors.torch import load_file, save_file
from serving import assert_served_alike
from tiny import build, greedy_references, save_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import chunkc
from chunkc import artifacts, entrance, folder_start, folder_state, imported_files, kept_start, model_start, start_draft
from chunkc.checkpoint import open_checkpoint
from chunkc.clean_process import NotClean
from chunkc.errors import CapacityError
from chunkc.folder_state import state_of
from chunkc.runtime.engine import Engine

pytestmark = pytest.mark.filterwarnings("ignore:No tokenizer loaded")


@pytest.fixture(scope="module")
def untied(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Folder of a tiny llama, a copy of it, and the cache with its prepared model.

    The tests put the folder back in its place: a model of another place is another.
    """
    folder = tmp_path_factory.mktemp("untied")
    save_tokenizer(folder / "model")
    build("llama", seed=1).save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "copy")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(artifacts, "cache_dir", lambda: folder / "kept")
        start(folder / "model")
    return folder / "model", folder / "copy", folder / "kept"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The cache of a test. This process counts as one that imported nothing, though the tests' own models are of
    imported code, and files that were just written as old."""
    monkeypatch.setattr(artifacts, "cache_dir", lambda: tmp_path / "cache")
    monkeypatch.setattr(entrance, "check_imports", lambda: None)
    monkeypatch.setattr(entrance, "check_modules", lambda: None)
    monkeypatch.setattr(kept_start, "torch_digest", lambda: "torch")
    monkeypatch.setattr(folder_state, "_YOUNG", -60.0)
    return tmp_path / "cache"


@pytest.fixture
def prepared(untied, cache) -> Path:
    """The tiny llama's folder; the cache has the prepared model."""
    folder, copy, kept = untied
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    shutil.copytree(kept, cache)
    return folder


@pytest.fixture
def folder(prepared) -> Path:
    """The tiny llama's folder, after its first start."""
    start(prepared)
    return prepared


def start(folder: Path, **options) -> Engine:
    return chunkc.compile(folder, num_pages=32, **options)


def is_from_the_folder(engine: Engine) -> bool:
    """Whether no model object was made. What it says of its check must agree."""
    kept = engine.explain().startswith("prepared from what an earlier start kept of the folder in ")
    against = "the model's logits, kept by an earlier start," if kept else "the model"
    assert f"checked against {against} in " in engine.explain()
    return kept


def assert_served_as_loaded(engine: Engine, folder: Path, **options) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    assert_served_alike(engine, greedy_references(model, (1, 9, 30), 5), steps_between=2)


class TookTheModel(Exception):
    """A start that loads a model was tried."""


@pytest.fixture
def no_model(monkeypatch) -> None:
    def loads(*arguments, **options):
        raise TookTheModel

    monkeypatch.setattr(model_start, "start", loads)


def test_a_second_start_makes_no_model(folder, monkeypatch):
    monkeypatch.setattr(model_start, "start", None)
    engine = start(folder)
    assert is_from_the_folder(engine)
    assert "as were the passes below" in engine.explain()
    assert_served_as_loaded(engine, folder)
    start(str(folder), verify="off")


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma3_text", "qwen2"))]
)
def test_tied_heads_shards_and_buffers(name, tmp_path, monkeypatch):
    layers = {"n_layer" if name == "gpt2" else "num_hidden_layers": 1 if name == "llama" else 2}
    folder = tmp_path / "model"
    build(name, tie_word_embeddings=True, **layers).save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    start(folder)
    monkeypatch.setattr(model_start, "start", None)
    engine = start(folder)
    assert is_from_the_folder(engine)
    assert_served_as_loaded(engine, folder)


@pytest.mark.parametrize("saved, asked", [("bfloat16", "float32"), ("float32", "float32"), ("float32", None)])
def test_the_dtype_is_that_asked_for(prepared, saved, asked, monkeypatch):
    AutoModelForCausalLM.from_pretrained(prepared, dtype=saved).save_pretrained(prepared)
    assert not is_from_the_folder(start(prepared, dtype=asked))
    monkeypatch.setattr(model_start, "start", None)
    engine = start(prepared, dtype=asked)
    assert is_from_the_folder(engine)
    assert_served_as_loaded(engine, prepared, dtype=asked or "auto")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(prepared, dtype):
    engines = [start(prepared, dtype=dtype) for _ in range(2)]
    assert [is_from_the_folder(engine) for engine in engines] == [False, True]
    tokens = [engine.generate([5, 6, 7], {"max_new_tokens": 9})[0].token_ids for engine in engines]
    assert tokens[0] == tokens[1]


def other_weights(folder: Path) -> None:
    build("llama", seed=2).save_pretrained(folder)


def another_head(folder: Path) -> None:
    """The head is another; a model with tied embeddings may look at the other tensor."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] *= 1.0001
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_bytes_in_place(folder: Path) -> None:
    """Same name, size and number, and a time of change that is set back."""
    file = folder / "model.safetensors"
    times, data = file.stat(), bytearray(file.read_bytes())
    data[-4096:] = data[-8192:-4096]
    with open(file, "r+b") as opened:
        opened.write(data)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def setting(file: str, **settings):
    def change(folder: Path) -> None:
        (folder / file).write_text(json.dumps({**json.loads((folder / file).read_text()), **settings}))

    return change


def another_token(folder: Path) -> None:
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"w20": 20, "w21": 21', '"w20": 21, "w21": 20'))


def another_file(folder: Path) -> None:
    (folder / "below").mkdir()
    (folder / "below" / "notes.json").write_text("{}")


CHANGES = [
    *(other_weights, another_head, other_bytes_in_place, another_token, another_file),
    pytest.param(setting("config.json", rms_norm_eps=0.01), id="config", marks=pytest.mark.slow),
    pytest.param(setting("generation_config.json", max_new_tokens=3), id="generation_config"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_folder_that_changed_is_served_as_it_is_now_and_kept(folder, change):
    change(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # nothing is broken
        engine = start(folder)
    assert not is_from_the_folder(engine)
    assert_served_as_loaded(engine, folder)
    again = start(folder)
    assert is_from_the_folder(again)
    assert_served_as_loaded(again, folder)
    for prompt in ("w20 w21 w5", [5, 6, 7]):
        assert again.generate(prompt)[0].token_ids == engine.generate(prompt)[0].token_ids


def test_of_two_tensors_that_the_model_ties_either_may_change(prepared):
    """The file has both, and the model looks at one."""
    folder = prepared
    build("llama", tie_word_embeddings=True).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    start(folder)
    assert is_from_the_folder(start(folder))
    another_head(folder)
    engine = start(folder)
    assert not is_from_the_folder(engine)
    assert_served_as_loaded(engine, folder)
    again = start(folder)
    assert_served_as_loaded(again, folder)


def test_files_that_are_young_are_not_kept(prepared, cache, monkeypatch):
    monkeypatch.setattr(folder_state, "_YOUNG", 3.0)
    start(prepared)
    assert not list(cache.glob("start-*"))
    with monkeypatch.context() as later:
        now = folder_state.now()
        later.setattr(folder_state, "now", lambda: now + 10)
        start(prepared)
    assert list(cache.glob("start-*"))


def test_files_that_change_while_they_are_loaded_are_not_kept(prepared, cache, monkeypatch):
    load = model_start.load

    def load_and_change(*arguments, **options):
        found = load(*arguments, **options)
        other_weights(prepared)
        return found

    monkeypatch.setattr(model_start, "load", load_and_change)
    start(prepared)
    assert not list(cache.glob("start-*"))


def test_files_that_change_while_they_are_read_are_not_served(folder, monkeypatch):
    preparation = folder_start._preparation

    def prepare_and_change(*arguments):
        found = preparation(*arguments)
        another_file(folder)
        return found

    monkeypatch.setattr(folder_start, "_preparation", prepare_and_change)
    assert not is_from_the_folder(start(folder))


@pytest.mark.parametrize("name", ["modeling_own.py", "below/code.py", "adapter_config.json", "adapter_model.bin"])
def test_a_folder_with_code_or_adapters_has_no_state(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path)
    assert set(state_of(tmp_path).files) == {"config.json"}
    (tmp_path / "below").mkdir()
    (tmp_path / name).write_text("{}")
    assert state_of(tmp_path) is None


@pytest.mark.parametrize(
    "config",
    [{"auto_map": {"AutoConfig": "own.Config"}}, {"text_config": {"quantization_config": {"bits": 4}}}, [], "{"],
)
def test_a_folder_that_names_code_or_packed_weights_has_no_state(tmp_path, config):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert (state_of(tmp_path) is None) == (config != [])


def test_why_the_model_was_taken_is_shown(folder, cache, monkeypatch):
    def refuse() -> None:
        raise NotClean("transformers was imported before")

    assert "not from the folder alone" not in start(folder).explain()
    monkeypatch.setattr(entrance, "check_imports", refuse)
    engine = start(folder)
    assert not is_from_the_folder(engine)
    assert "not from the folder alone: transformers was imported before\n" in engine.explain()


def test_a_process_that_cannot_be_looked_at_takes_the_long_way(untied, monkeypatch) -> None:
    """A module that raises at whoever looks at it is nobody's reason to be served nothing."""

    def look() -> None:
        raise RuntimeError("hands off")

    monkeypatch.setattr(entrance, "check_modules", look)
    told = start(untied[0]).explain()
    assert "not from the folder alone: what this process is cannot be told (RuntimeError: hands off)\n" in told


def test_a_gguf_file_takes_the_model(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(NotClean, match=r"model\.gguf is no folder"):
        entrance.enter(tmp_path, None, 128)
    with pytest.raises(NotClean, match="a/name is a name on the hub"):
        entrance.enter("a/name", None, 128)


def cut_off(data: bytes) -> bytes:
    return data[:-4]


def flip_a_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", ["start.json", "start.safetensors"])
@pytest.mark.parametrize("damage", [cut_off, flip_a_bit])
def test_a_damaged_start_is_said_once_and_made_again(folder, cache, name, damage):
    (entry,) = cache.glob("start-*")
    (entry / name).write_bytes(damage((entry / name).read_bytes()))
    with pytest.warns(RuntimeWarning, match=rf"start-.* is damaged \({name}\); it is made again") as said:
        engine = start(folder)
    assert len(said) == 1
    assert not is_from_the_folder(engine)
    assert is_from_the_folder(start(folder))


def test_a_damaged_library_is_said_and_not_used(folder, cache, no_model):
    library = next(iter(cache.glob("graph-*"))) / "graph.so"
    library.unlink()  # this process has it loaded
    library.write_bytes(b"\x7fELF")
    with pytest.warns(RuntimeWarning, match=r"is damaged \(graph.so\); it is made again"), pytest.raises(TookTheModel):
        start(folder)


def test_a_start_that_breaks_off_is_said_once_and_leaves_nothing(folder, cache, monkeypatch):
    with monkeypatch.context() as broken:
        broken.setattr(folder_start, "make_runner", None)
        with pytest.warns(RuntimeWarning, match=r"cannot be used \(TypeError.*; it is made again") as said:
            engine = start(folder)
    assert len(said) == 1
    assert not is_from_the_folder(engine)
    assert is_from_the_folder(start(folder))


def test_a_cache_that_does_not_fit_is_an_error_either_way(folder, cache):
    with pytest.raises(CapacityError):
        chunkc.compile(folder, num_pages=2**40)
    assert list(cache.glob("start-*"))


def rewrite_entry(entry: Path, name: str, change) -> None:
    """Change an entry's data and make its hash right again."""
    index = json.loads((entry / "entry.json").read_text())
    data = json.loads((entry / name).read_text())
    change(data)
    text = json.dumps(data)
    index["files"][name] = hashlib.sha256(text.encode()).hexdigest()
    (entry / name).write_text(text)
    (entry / "entry.json").write_text(json.dumps(index))


def swap_layers(data) -> None:
    first, second = (f"hf.model.layers.{i}.mlp.down_proj.weight" for i in (0, 1))
    data["weights"][first], data["weights"][second] = data["weights"][second], data["weights"][first]


def swap_gate_and_up(data) -> None:
    for how in data["made"].values():
        if how["kind"] == "concatenated" and len(how["parts"]) == 2:
            how["parts"].reverse()


def test_a_start_of_the_wrong_weights_is_said_and_not_used(folder, cache):
    rewrite_entry(next(cache.glob("start-*")), "start.json", swap_layers)
    with pytest.warns(RuntimeWarning, match=r"fails the check .*; it is made again") as said:
        engine = start(folder)
    assert len(said) == 1
    assert not is_from_the_folder(engine)
    assert_served_as_loaded(engine, folder)
    assert is_from_the_folder(start(folder))


def test_a_prepared_model_that_is_wrong_is_not_used(folder, cache, no_model):
    rewrite_entry(next(cache.glob("model-*")), "model.json", swap_gate_and_up)
    with pytest.warns(RuntimeWarning, match="fails the check"), pytest.raises(TookTheModel):
        start(folder)


def another_time(imported) -> None:
    size, time, *rest = imported_files._stat(__file__)
    imported["files"][__file__] = [size, time + 1, *rest]


def another_file_of_that_size_and_time(imported) -> None:
    *same, number = imported_files._stat(__file__)
    imported["files"][__file__] = [*same, number + 1]


def a_file_that_is_gone(imported) -> None:
    imported["files"]["/gone.py"] = [1, 1, 1, 1]


def another_place(imported) -> None:
    imported["origins"]["transformers"] = "/elsewhere/transformers/__init__.py"


def a_new_package(imported) -> None:
    imported["folders"] = {folder: time - 1 for folder, time in imported["folders"].items()}


@pytest.mark.parametrize(
    "change",
    [another_time, another_file_of_that_size_and_time, a_file_that_is_gone, another_place, a_new_package],
)
def test_code_of_other_files_is_another_start(folder, cache, no_model, change):
    rewrite_entry(next(cache.glob("start-*")), "start.json", lambda data: change(data["imported"]))
    with pytest.raises(TookTheModel):
        start(folder)


def test_what_was_imported_is_what_an_import_finds(tmp_path, monkeypatch):
    assert set(imported_files.imported_since((), sys.path).files) >= {transformers.__file__, pytest.__file__}
    assert transformers.__file__ not in imported_files.imported_since(set(sys.modules), sys.path).files
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert imported_files.imported_since((), sys.path) is None


@pytest.mark.parametrize(
    "options", [{"mode": "eager"}, {"dtype": "float16"}, {"page_size": 16}, {"passes": ["a"]}, {"dump": "x"}]
)
def test_other_options_take_the_model(folder, no_model, options):
    with pytest.raises(TookTheModel):
        start(folder, **options)


def test_what_was_not_checked_is_not_kept(prepared, cache):
    start(prepared, verify="off")
    assert not list(cache.glob("start-*"))


def origins(model, folder: Path, *names: str):
    """What of a folder the weights of these names are."""
    model.save_pretrained(folder)
    prepared = SimpleNamespace(program=SimpleNamespace(weights=[f"hf.{name}" for name in names]), made={})
    return start_draft._origins(model, prepared, open_checkpoint(folder))


def test_weights_that_are_merged_on_loading_take_the_model(tmp_path):
    model = build("mixtral")
    experts = [name for name, _ in model.named_parameters() if ".experts." in name]
    assert origins(model, tmp_path, "lm_head.weight") is not None
    assert experts and origins(model, tmp_path, "lm_head.weight", *experts) is None


def test_weights_that_are_not_the_files_take_the_model(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    model.lm_head.weight.data[3] += 1
    prepared = SimpleNamespace(program=SimpleNamespace(weights=["hf.lm_head.weight"]), made={})
    assert start_draft._origins(model, prepared, open_checkpoint(tmp_path)) is None


def test_files_of_a_base_model_lack_its_prefix(tmp_path):
    model = build("gpt2", tie_word_embeddings=True)
    model.transformer.save_pretrained(tmp_path)
    prepared = SimpleNamespace(program=SimpleNamespace(weights=["hf.lm_head.weight"]), made={})
    weights, buffers = start_draft._origins(model, prepared, open_checkpoint(tmp_path))
    assert weights["hf.lm_head.weight"].name == "wte.weight" and not buffers


@pytest.mark.parametrize("damage", [lambda data: data[:-4], lambda data: b"\xff" * 8 + data, lambda data: b""])
def test_a_folder_of_half_a_file_has_no_checkpoint(tmp_path, damage):
    build("llama").save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path) is not None
    file = tmp_path / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert open_checkpoint(tmp_path) is None


def test_text_chats_and_generation_defaults(folder):
    model = build("llama", seed=1)
    model.generation_config.update(max_new_tokens=7, eos_token_id=[3, 5], repetition_penalty=1.3, num_beams=4)
    model.generation_config.save_pretrained(folder)
    prompts = ["w7 w8", [{"role": "user", "content": "w4 w6 w11"}], [5, 6, 7]]
    found = []
    for from_the_folder in (False, True):
        with pytest.warns(UserWarning, match="num_beams=4"):
            engine = start(folder)
        assert is_from_the_folder(engine) == from_the_folder
        completions = engine.generate(prompts)
        stopped = engine.generate("w7 w8", {"stop_strings": completions[0].text.split()[1]})
        found.append([(each.token_ids, each.text, each.finish_reason) for each in (*completions, *stopped)])
        found[-1].append((type(engine.tokenizer), engine.tokenizer.chat_template, repr(engine.tokenizer)))
    assert found[0] == found[1]
    assert len(found[0][2][0]) <= 7


def test_a_tokenizer_that_is_given_is_used(folder, no_model):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert start(folder, tokenizer=tokenizer).tokenizer is tokenizer
