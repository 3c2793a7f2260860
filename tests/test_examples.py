"""Every example runs, as a user would run it.

But loading and compiling, which take the longest, are done once: `chunkc.compile` gives out one engine wherever an
example asks for a compiled one with nothing special, and compiles the model that is loaded already elsewhere.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import chunkc
from chunkc.models import DEFAULT_MODEL

FOLDER = Path(__file__).parent.parent / "examples"
SAYS = {
    "quickstart.py": ["Paris", "'Once upon a time' -> ", "first token after"],
    "streaming.py": ["1 decode + 63 prefill tokens -> a token for: short", "long prompt: length"],
    "custom_pass.py": ["spell_out_silu", "Paris"],
    "inspect_graph.py": ["recognize_attention", "00_captured.py"],
}
#: these compile the model anew
COMPILE = ("custom_pass.py", "inspect_graph.py")


def test_every_example_is_tested():
    assert {file.name for file in FOLDER.glob("*.py")} == set(SAYS)


@pytest.mark.parametrize(
    "name", ["quickstart.py", "streaming.py", *(pytest.param(name, marks=pytest.mark.slow) for name in COMPILE)]
)
def test_the_example_runs(name, smollm2, smollm2_engine, monkeypatch, capsys, tmp_path):
    really_compile = chunkc.compile

    def compile(source, budget=512, **options):
        assert source == DEFAULT_MODEL
        if options:
            return really_compile(smollm2[0], budget, tokenizer=smollm2[1], **options)
        smollm2_engine.budget = budget
        return smollm2_engine

    monkeypatch.setattr(chunkc, "compile", compile)
    monkeypatch.setattr(sys, "argv", [name, str(tmp_path)] if name == "inspect_graph.py" else [name])
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert not smollm2_engine.has_unfinished()
    out = capsys.readouterr().out
    for said in SAYS[name]:
        assert said in out
