"""Memory: a model loaded by name is never there twice, and one that is given stays whole."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from serving import assert_served_alike
from tiny import build, greedy_references, save_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

import chunkc
import chunkc.model_start
import chunkc.models
from chunkc.errors import VerificationError
from chunkc.passes import fuse_linears

#: serves a large model; imports, libraries and what a compilation leaves are paid for by a tiny one before
_PEAK = """
import sys
from pathlib import Path

import chunkc
from chunkc import artifacts, entrance, kept_start, memory

tiny, folder, kept, *sources = sys.argv[1:]
artifacts.cache_dir = lambda: Path(kept)


def resident(what):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def serve(name):
    engine = chunkc.compile(name, num_pages=64, page_size=16, max_requests=8)
    engine.generate([5, 6, 7] * 30, chunkc.SamplingParams(max_new_tokens=4, ignore_eos=True))
    return engine.explain()


serve(tiny), serve(tiny)
if "what an earlier start kept" in sources:  # this process counts as one that imported nothing yet
    entrance.check_imports = entrance.check_modules = lambda: None
    kept_start.torch_digest = lambda: "torch"
for source in sources:
    memory.give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = resident("VmRSS")
    assert f"prepared from {source}" in serve(folder)
    print(resident("VmHWM") - before)
"""


def save(folder: Path, **sizes) -> int:
    """Saves a random llama with a tokenizer; returns the bytes of its weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        **sizes,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read as Linux counts them")
def test_memory_peaks_little_above_weights_and_cache(tmp_path):
    save(tmp_path / "tiny", vocab_size=100, hidden_size=64, intermediate_size=64)
    weights = save(tmp_path / "large", vocab_size=16_000, hidden_size=1024, intermediate_size=3072)
    assert weights > 230e6
    cache = 64 * 16 * 4 * 2 * 2 * 128 * 4  # pages, tokens, layers, keys and values, heads, their size, bytes
    folders = [str(tmp_path / name) for name in ("tiny", "large", "kept")]
    peaks = peaks_of(*folders, "the model", "the cache")
    peaks += peaks_of(*folders, "the cache", "what an earlier start kept")
    assert len(peaks) == 4
    assert max(peaks) < 1.35 * (weights + cache), [peak / (weights + cache) for peak in peaks]


def peaks_of(*arguments: str) -> list[int]:
    """What the script prints, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", _PEAK, *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return [int(line) for line in result.stdout.split()]


@pytest.fixture
def saved(tmp_path):
    """Folder of a tiny random llama."""
    build("llama").save_pretrained(tmp_path)
    return tmp_path


def test_the_tensors_of_a_model_loaded_by_name_are_let_go(saved, monkeypatch):
    loaded = []

    def load(*arguments, **keywords):
        model, tokenizer = chunkc.models.load(*arguments, **keywords)
        loaded.extend(weakref.ref(parameter) for parameter in model.parameters() if parameter.dim() == 2)
        return model, tokenizer

    monkeypatch.setattr(chunkc.model_start, "load", load)
    with pytest.warns(UserWarning, match="No tokenizer"):
        engine = chunkc.compile(saved, mode="eager", num_pages=32)
    gc.collect()
    kept = [parameter() for parameter in loaded if parameter() is not None]
    assert len(loaded) == 2 + 2 * 7 and len(kept) <= 1  # the embedding
    assert_served_alike(engine, greedy_references(build("llama"), (9, 20), 5))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_model_that_is_given_stays_whole(dtype):
    model = build("llama", tie_word_embeddings=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    chunkc.compile(model, dtype=dtype, mode="eager", num_pages=8)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("by_name", [True, False])
def test_a_mismatch_names_the_module_though_weights_were_let_go(saved, by_name, monkeypatch):
    model = saved if by_name else build("llama")
    right = fuse_linears.Concatenated
    monkeypatch.setattr(fuse_linears, "Concatenated", lambda parts: right(parts[::-1] if len(parts) == 2 else parts))
    with warnings.catch_warnings(), pytest.raises(VerificationError) as caught:
        warnings.simplefilter("ignore", UserWarning)  # no tokenizer
        chunkc.compile(model, mode="eager", num_pages=8)
    assert caught.value.module.startswith("model.layers.0.mlp")
