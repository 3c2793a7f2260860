"""Building, caching and loading the C++ body."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

USE = """
import warnings, torch
from chunkc.kernels import cpu_backend
from chunkc.kernels.cases import make_case
from chunkc.kernels.tasks import AttentionShape
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    loaded = [cpu_backend.load(torch.float32), cpu_backend.load(torch.float32)]
out = make_case([3, 1], [30, 9], AttentionShape(4, 2, 16, 16)).run()
assert out.isfinite().all() and out.any()
print(loaded, cpu_backend.active_body(), [str(w.message) for w in caught if w.category is RuntimeWarning])
"""


def start(cache: Path, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", USE],
        env={**os.environ, "CHUNKC_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow  # the planner's library, which is small, shows the same each time
def test_processes_that_build_at_once_share_one_library(tmp_path: Path) -> None:
    processes = [start(tmp_path / "cache") for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert out.strip() == "[True, True] cpp []"
    files = [p.name for p in (tmp_path / "cache").glob("cpu_attention_*/**/*") if p.is_file()]
    assert sorted(files) == ["cpu_attention_float32.sha256", "cpu_attention_float32.so", "lock"], (
        "one library, and no half-built one"
    )


def test_without_a_compiler_one_warning_and_the_reference(tmp_path: Path) -> None:
    out, err = start(tmp_path, CXX="no-such-compiler").communicate(timeout=60)
    assert out.startswith("[False, False] reference ['chunkc found no C++ compiler"), err
    assert out.count("found no C++ compiler") == 1
