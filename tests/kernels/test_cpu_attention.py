"""The C++ body's own paths: few rows and many, every instruction set it can be built for, what its layouts rest on."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from chunkc.kernels import cpu_backend, reference
from chunkc.kernels.cases import MixedCase, make_case, tolerance
from chunkc.kernels.tasks import AttentionShape, plan_tasks

from .oracle import expected

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Builds the body with other flags and compares it with the reference.
VARIANT = """
import dataclasses, sys, torch
from chunkc.kernels import cpu_backend, libraries, ops, reference
from chunkc.kernels.cases import make_case, tolerance
from chunkc.kernels.tasks import AttentionShape
for dtype, library in libraries.ATTENTION.items():
    flags = tuple(f for f in library.flags if not f.startswith("-march")) + tuple(sys.argv[1:])
    libraries.ATTENTION[dtype] = dataclasses.replace(library, flags=flags)
assert cpu_backend.load()
torch.set_num_threads(1)
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for qk_dim, v_dim in ((16, 16), (24, 40), (33, 17), (64, 64), (80, 96), (192, 128)):
        for group in (1, 3, 5, 12):
            shape = AttentionShape(2 * group, 2, qk_dim, v_dim, window=50 if group == 3 else 0)
            features = {"sinks": True, "softcap": 4.0 * (group == 5), "alibi": group > 3}
            case = make_case([1, 30, 3], [150, 100, 70], shape, dtype=dtype, **features)
            table = case.plan(kv_split=64)
            want = reference.mixed_attention(*case.arguments(table))
            torch.testing.assert_close(case.run(table), want, **tolerance(dtype))
"""


@pytest.fixture(autouse=True)
def cpp() -> None:
    assert cpu_backend.load()


def check(case: MixedCase, **plan: int | None) -> None:
    torch.testing.assert_close(case.run(case.plan(**plan)).double(), expected(case), **tolerance(case.q.dtype))


#: portable, AVX2, AVX512 without bfloat16 products; and what a CPU must say of itself to run it
INSTRUCTION_SETS = {"-march=x86-64": "", "-march=haswell": "avx2", "-march=skylake-avx512": "avx512vl"}


@pytest.fixture(scope="module")
def variants(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.Popen[str]]:
    """A process for each instruction set that is asked for and this CPU has; all at once, since most of it is one
    compiler's work."""
    if platform.machine() != "x86_64":
        pytest.skip("the flags are those of x86")
    here = Path("/proc/cpuinfo").read_text().split()
    started = {}
    for flags, needed in INSTRUCTION_SETS.items():
        asked = any(flags in item.name for item in request.session.items)
        if asked and (not needed or needed in here):
            folder = str(tmp_path_factory.mktemp("cache"))
            environment = {**os.environ, "CHUNKC_CACHE_DIR": folder, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", VARIANT, flags]
            started[flags] = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    return started


@pytest.mark.parametrize(
    "flags", [pytest.param(f, marks=pytest.mark.slow) if f == "-march=skylake-avx512" else f for f in INSTRUCTION_SETS]
)
def test_every_instruction_set(flags: str, variants: dict[str, subprocess.Popen[str]]) -> None:
    if flags not in variants:
        pytest.skip("this CPU cannot run it")
    _, said = variants[flags].communicate(timeout=300)
    assert variants[flags].returncode == 0, said


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [4, 8, 9, 16, 33])
def test_decodes_of_large_groups(group: int, dtype: torch.dtype) -> None:
    """Rows of a decode are dot products up to some number and register tiles above."""
    check(make_case([1, 1, 1], [5, 130, 64], AttentionShape(2 * group, 2, 64, 64), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("qk_dim", "v_dim"), [(1, 1), (17, 33), (63, 65), (31, 8)])
def test_odd_head_dims(qk_dim: int, v_dim: int, dtype: torch.dtype) -> None:
    check(make_case([1, 40], [90, 70], AttentionShape(4, 2, qk_dim, v_dim), dtype=dtype), kv_split=32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [-0.2, 0.0, 3.0])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_any_scale(scale: float, softcap: float, dtype: torch.dtype) -> None:
    case = make_case([1, 40], [90, 70], AttentionShape(4, 2, 32, 32), dtype=dtype, softcap=softcap)
    check(dataclasses.replace(case, scale=scale))


@pytest.mark.parametrize("q_len", [1, 2, 30])  # few rows and many
@pytest.mark.parametrize("kv_len", [31, 64, 65, 127, 300])
@pytest.mark.parametrize("dim", [16, 40, 64, 65])
def test_rounded_weights_lose_little(q_len: int, kv_len: int, dim: int) -> None:
    """The tolerance of bfloat16 is wide for averages of many keys; the mean error is not. A key left out shows."""
    case = make_case([q_len], [kv_len], AttentionShape(6, 2, dim, dim), dtype=torch.bfloat16)
    want, table = expected(case), case.plan()
    mine, best = (
        (body(*case.arguments(table)).double() - want).pow(2).mean().sqrt()
        for body in (torch.ops.chunkc.mixed_attention, reference.mixed_attention)
    )
    assert mine < 1.6 * best


@pytest.mark.parametrize("q_len", [1, 30])
def test_equal_values_come_out_as_they_are(q_len: int) -> None:
    """However weights are rounded, they sum up to 1."""
    case = make_case([q_len], [301], AttentionShape(6, 2, 64, 64), dtype=torch.bfloat16, score_std=4.0)
    case = dataclasses.replace(case, v=torch.full_like(case.v, 1.703125), v_pages=case.v_pages * 0 + 1.703125)
    assert torch.equal(case.run(), torch.full_like(case.run(), 1.703125))


@pytest.mark.parametrize("window", [3, 20, 64, 100])
@pytest.mark.parametrize("q_block", [8, 64, 256])
def test_blocks_wider_than_the_window(window: int, q_block: int) -> None:
    """Of a tile only the rows that see it are computed; between the tiles of one block these move on."""
    shape = AttentionShape(6, 2, 32, 32, window=window)
    check(make_case([200, 1], [230, 150], shape, page_size=16), q_block=q_block)


@pytest.mark.parametrize("chunk", [16, 70])
def test_blocks_wider_than_a_chunk(chunk: int) -> None:
    check(make_case([200], [230], AttentionShape(4, 2, 32, 32, chunk=chunk)), q_block=256)


@pytest.mark.parametrize("page_size", [16, 48, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "group", "features"), [(20, 1, {}), (3, 5, {"alibi": True}), (4, 3, {"sinks": True})]
)
def test_heads_done_together_or_one_by_one_give_the_same_bits(
    heads: int, group: int, features: dict[str, bool], dtype: torch.dtype, page_size: int
) -> None:
    """Few rows of neighbouring heads are one bundle; apart in the table they are not."""
    shape = AttentionShape(heads * group, heads, 32, 32, window=250 if group == 3 else 0)
    case = make_case([1, 1, 1], [333, 50, 301], shape, dtype=dtype, page_size=page_size, **features)
    table = case.plan(units=1, kv_split=192)
    by_head = torch.argsort(table.tasks[:, 1], stable=True)
    apart = dataclasses.replace(table, tasks=table.tasks[by_head].contiguous())
    assert torch.equal(case.run(table), case.run(apart))


def test_a_step_of_many_small_tasks_runs_on_the_threads_there_are() -> None:
    case = make_case([1] * 40, [1 + 37 * i % 300 for i in range(40)], AttentionShape(6, 2, 64, 64))
    want = case.run(case.plan(kv_split=16))
    for threads in (2, 5):
        torch.set_num_threads(threads)
        assert torch.equal(case.run(case.plan(kv_split=16)), want)


def test_two_python_threads_with_thread_counts_of_their_own() -> None:
    """As when prefill and decode run side by side: each thread sets its own number, nothing is shared."""
    shape = AttentionShape(6, 2, 64, 64)
    jobs = [(make_case([1] * 6, [700] * 6, shape), 1), (make_case([300], [400], shape, seed=1), 2)]
    want = [case.run() for case, _ in jobs]
    got: list[list[torch.Tensor]] = [[], []]

    def work(index: int) -> None:
        case, threads = jobs[index]
        torch.set_num_threads(threads)
        got[index] = [case.run() for _ in range(20)]

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for results, right in zip(got, want, strict=True):
        assert len(results) == 20 and all(torch.equal(result, right) for result in results)


def test_infinite_scores_are_as_in_the_reference() -> None:
    """Scores of -inf weigh nothing; rows that see nothing else are 0 or NaN as in the reference, not garbage."""
    case = make_case([1, 20], [40, 40], AttentionShape(4, 2, 32, 32))
    case.q[:] = case.q.abs()
    keys = case.k_pages.nan_to_num()
    keys[:, :, ::2] = -torch.inf
    case = dataclasses.replace(case, k_pages=keys)
    m = case.metadata
    table = plan_tasks(m.q_offsets, m.kv_lens, case.shape, page_size=16, units=1)
    want = reference.mixed_attention(*case.arguments(table))
    torch.testing.assert_close(case.run(table), want, equal_nan=True, **tolerance(torch.float32))
