"""Native libraries are built in the background before anybody needs them, and errors are left to who does."""

from __future__ import annotations

import json
import threading

import pytest
import torch

from chunkc import early_builds
from chunkc.errors import ChunkcError
from chunkc.kernels.native import NativeLibrary


class _Library:
    def __init__(self, built: bool, error: Exception | None = None) -> None:
        self.built, self.error, self.calls = built, error, 0
        self.may_go_on = threading.Event()

    def is_built(self) -> bool:
        return self.built

    def find_or_build(self) -> None:
        self.calls += 1
        assert self.may_go_on.wait(20)
        if self.error is not None:
            raise self.error


def _begin(monkeypatch: pytest.MonkeyPatch, linear: _Library, attention: _Library, plan: _Library) -> list:
    monkeypatch.setattr(early_builds.libraries, "LINEAR", {torch.float32: linear})
    monkeypatch.setattr(early_builds.libraries, "ATTENTION", {torch.float32: attention})
    monkeypatch.setattr(early_builds.libraries, "PLANNER", plan)
    monkeypatch.setattr(early_builds.libraries, "ONEDNN", _Library(built=True))
    before = set(threading.enumerate())
    early_builds.begin(torch.float32)
    return [thread for thread in threading.enumerate() if thread not in before]


def test_what_is_missing_is_built_meanwhile(monkeypatch):
    broken, fine, there = _Library(False, ChunkcError("no")), _Library(False), _Library(True)
    threads = _begin(monkeypatch, broken, there, fine)  # returns although nothing may be built yet
    assert threads and all(thread.daemon for thread in threads)
    for library in (broken, fine):
        library.may_go_on.set()
    for thread in threads:
        thread.join(20)
    assert (broken.calls, fine.calls, there.calls) == (1, 1, 0)


def test_where_all_is_there_nothing_is_started(monkeypatch):
    assert _begin(monkeypatch, *(_Library(True) for _ in range(3))) == []


def test_only_what_a_dtype_needs_is_built(monkeypatch):
    """And where it is not known, what models have most."""
    built = []
    monkeypatch.setattr(NativeLibrary, "is_built", lambda library: bool(built.append(library.name)) or True)
    monkeypatch.setattr(early_builds, "instruction_sets", lambda: "avx512f")
    early_builds.begin(torch.float16)  # whose linears are not packed
    assert built == ["cpu_attention_float16", "planner"]
    built.clear()
    early_builds.begin(torch.bfloat16)
    assert sorted(built) == ["cpu_attention_bfloat16", "cpu_linear_bfloat16", "planner"]
    built.clear()
    early_builds.begin(None)
    assert len(built) == 5 and not any("float16" in name.replace("bfloat16", "") for name in built)
    built.clear()
    early_builds.begin(torch.float64)  # will be refused
    assert built == ["planner"]


@pytest.mark.parametrize(
    ("config", "asked", "dtype"),
    [
        ({"torch_dtype": "bfloat16"}, None, torch.bfloat16),
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, None, torch.float16),
        ({"text_config": {"dtype": "float32"}, "dtype": None}, None, torch.float32),
        ({"dtype": "bfloat16"}, "float32", torch.float32),
        ({"dtype": "bfloat16"}, torch.float16, torch.float16),
        ({}, None, None),
        ({"dtype": "int4"}, None, None),
        ({"dtype": ["no", "name"]}, None, None),
        ({"dtype": "bfloat16"}, "no dtype", None),
        (None, None, None),
    ],
)
def test_the_dtype_of_a_folder_is_told_or_left_open(tmp_path, config, asked, dtype):
    (tmp_path / "config.json").write_text("{" if config is None else json.dumps(config))
    assert early_builds.likely_dtype(tmp_path, asked) == dtype
    assert early_builds.likely_dtype(str(tmp_path), asked) == dtype


def test_the_dtype_of_models_and_other_things(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    assert early_builds.likely_dtype(tmp_path, None) == torch.float32
    assert early_builds.likely_dtype(torch.nn.Linear(2, 2, dtype=torch.float16), None) == torch.float16
    for odd in (tmp_path / "none", torch.nn.Identity(), None, 3, "nobody/has-such-a-model"):
        assert early_builds.likely_dtype(odd, None) is None
