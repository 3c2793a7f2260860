"""Digests of code: equal for equal code wherever it stands, and another for any other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chunkc.code_digest import digest

_TEXT = "def f(x, y=1):\n    def g():\n        return x in {'a', 'b', 'c', 'd'} or (x + 2, 'text', None)\n    return g"


def of(text: str, file: str = "<string>") -> str:
    names: dict = {}
    exec(compile(text, file, "exec", dont_inherit=True), names)
    return digest(names["f"].__code__)


def test_where_code_stands_does_not_matter():
    assert of(_TEXT) == of("\n\n" + _TEXT, "elsewhere.py")


@pytest.mark.parametrize(
    "old, new", [("2", "3"), ("2", "2.0"), ("'text'", "'other'"), ("+", "-"), ("'d'", "'e'"), ("(x, y", "(x, *, y")]
)
def test_other_code_has_another(old, new):
    assert of(_TEXT) != of(_TEXT.replace(old, new))


def test_it_is_the_same_in_every_process():
    script = f"from chunkc.code_digest import digest\n{_TEXT}\nprint(digest(f.__code__))"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", script]
        found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == of(_TEXT)
