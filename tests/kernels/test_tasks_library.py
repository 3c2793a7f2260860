"""Building, caching and loading the planner's library, and planning without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from chunkc.errors import ChunkcError
from chunkc.kernels import planner

USE = """
import torch
from chunkc.kernels.tasks import AttentionShape, plan_tasks
shape = AttentionShape(4, 2, 16, 16)
table = plan_tasks(torch.tensor([0, 1, 41]), torch.tensor([100, 60]), shape, page_size=16, units=2)
print(len(table.tasks), sorted(set(table.tasks[:, 0].tolist())))
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", USE],
        env={**os.environ, "CHUNKC_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_build_at_once_share_one_library(tmp_path: Path) -> None:
    for process in [start(tmp_path / "cache") for _ in range(3)]:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.endswith("[0, 1]\n"), err
    files = [p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert sorted(files) == ["lock", "planner.sha256", "planner.so"]


def test_without_a_compiler_the_plain_plan_serves(tmp_path: Path) -> None:
    out, err = start(tmp_path, CXX="no-such-compiler").communicate(timeout=60)
    assert out == "6 [0, 1]\n", err  # for each of 2 heads, the decode and 80 rows in blocks of 64
    assert not list(tmp_path.iterdir())


def test_a_library_that_does_not_load_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planner.so").write_text("no library")
    monkeypatch.setattr(planner, "_tried", False)
    monkeypatch.setattr(planner, "_library", None)
    monkeypatch.setattr(planner.libraries, "PLANNER", SimpleNamespace(find_or_build=lambda: tmp_path / "planner.so"))
    with pytest.raises(ChunkcError, match="does not load"):
        planner.load()
