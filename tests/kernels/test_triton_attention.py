"""The Triton body without a GPU: its tests run in Triton's interpreter, in a process of their own, as the interpreter
must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from chunkc.kernels import ops  # noqa: F401

pytest.importorskip("triton")


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    process = start(*arguments, **environment)
    out, err = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def test_semantics_in_the_interpreter() -> None:
    """Runs ``triton_semantics.py``, in two processes at a time. With TRITON_INTERPRET=1 set, pytest can be given that
    file and one test's name."""
    file = Path(__file__).with_name("triton_semantics.py")
    half = "together or groups or dims or alibi"
    run = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), "-k")
    for process in [start(*run, which, TRITON_INTERPRET="1") for which in (half, f"not ({half})")]:
        out, err = process.communicate()
        if process.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            pytest.skip(out)
        assert process.returncode == 0, out[-8000:] + err[-2000:]


def test_on_cpu_only_importing_the_operators_imports_no_triton() -> None:
    done = python("-c", "import chunkc.kernels.ops, sys; print('triton' in sys.modules)", CUDA_VISIBLE_DEVICES="")
    assert done.stdout.strip() == "False", done.stdout + done.stderr


def test_the_body_serves_cuda_tensors_where_torch_knows_cuda() -> None:
    registered = torch._C._dispatch_has_kernel_for_dispatch_key("chunkc::mixed_attention", "CUDA")
    assert registered == torch.backends.cuda.is_built()
