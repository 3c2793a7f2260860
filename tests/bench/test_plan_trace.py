"""Batches from a trace: the engine's scheduler under a virtual clock."""

from __future__ import annotations

import pytest

from chunkc.bench.__main__ import main
from chunkc.bench.plan_trace import Arrival, ServedModel, batches, read_trace
from chunkc.bench.workload import WorkloadError
from chunkc.kernels.device import H100
from chunkc.kernels.tasks import AttentionShape

SHAPE, MODEL = AttentionShape(32, 8, 128, 128), ServedModel(8e9, 32)
HEADER = "arrived_at,num_prefill_tokens,num_decode_tokens"


def run(arrivals, **options):
    steps = batches(arrivals, MODEL, SHAPE, H100, **{"budget": 64, "page_size": 16, **options})
    return [list(zip(step.q_lens.tolist(), step.kv_lens.tolist(), strict=True)) for step in steps]


def test_prompts_are_chunked_and_decodes_go_first():
    # the last request comes when the others are done, and ends the trace
    steps = run([Arrival(0, 100, 3), Arrival(0, 20, 2), Arrival(9, 5, 1)])
    assert steps[:4] == [
        [(64, 64)],
        [(36, 100), (20, 20)],
        [(1, 101), (1, 21)],
        [(1, 102)],
    ]
    assert steps[4:] == [[(5, 5)]]


def test_requests_come_while_others_are_served():
    step = MODEL.linear_seconds(1, H100)
    steps = run([Arrival(0, 10, 50), Arrival(10 * step, 10, 50), Arrival(20 * step, 10, 1)])
    joined = next(i for i, batch in enumerate(steps) if len(batch) == 2)
    assert 8 <= joined <= 11
    assert steps[joined] == [(1, 10 + joined), (10, 10)]
    # at twice the rate they come in half the steps
    faster = run([Arrival(0, 10, 50), Arrival(10 * step, 10, 50), Arrival(20 * step, 10, 1)], rate=2.0)
    assert 4 <= next(i for i, batch in enumerate(faster) if len(batch) == 2) <= 6


def test_a_step_reads_all_parameters_and_multiplies_them_with_every_token():
    assert MODEL.linear_seconds(1, H100) == pytest.approx(16e9 / H100.bandwidth)
    assert MODEL.linear_seconds(4096, H100) == pytest.approx(2 * 8e9 * 4096 / H100.matrix_rate)


def test_traces_are_read_by_arrival_and_empty_requests_are_left_out(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(f"{HEADER}\n2.5,30,4\n0,10,1\n3,0,5\n4,7,0\n5,8,9\n")
    assert read_trace(file) == [Arrival(0.0, 10, 1), Arrival(2.5, 30, 4), Arrival(5.0, 8, 9)]
    assert len(read_trace(file, 2)) == 2


@pytest.mark.parametrize(
    "content, said",
    [
        ("a,b\n1,2\n", "has no column 'arrived_at'"),
        ("", "has no column"),
        (f"{HEADER}\n1,2\n", "not three numbers"),
        (f"{HEADER}\n1,2,x\n", "not three numbers"),
        (f"{HEADER}\n", "holds no request"),
    ],
)
def test_a_bad_trace_is_refused_in_one_sentence(content, said, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(content)
    with pytest.raises(WorkloadError, match=said):
        read_trace(file)


def test_the_command_compares_plans_and_grid_over_a_trace(tmp_path, capsys):
    file = tmp_path / "trace.csv"
    lines = [f"{i * 0.05},{200 + 37 * (i % 20)},{20 + i % 9}" for i in range(60)]
    file.write_text("\n".join([HEADER, *lines]))
    assert main(["plan", "--trace", str(file), "--batches", "20", "--budget", "128"]) == 0
    out = capsys.readouterr().out
    assert "of 60 requests, budget 128" in out and "20 of " in out
    for name in ("chunkc", "vLLM-style grid"):
        assert any(line.startswith(name) and "all" in line for line in out.splitlines())
