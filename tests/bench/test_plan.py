"""``python -m chunkc.bench plan``: its simulation, its input and what it prints."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from chunkc.bench.__main__ import main
from chunkc.bench.plan_model import Batch, ideal_seconds, list_makespan, simulate, simulate_grid, simulate_plan
from chunkc.bench.plan_table import Planner
from chunkc.kernels.device import H100, DeviceModel, cpu
from chunkc.kernels.tasks import AttentionShape

SHAPE = AttentionShape(32, 8, 128, 128)
# 10 slots; a key 512 s from memory and 256 s from the cache, a row of 16 on a key 512 s, a task 100 s
TOY = DeviceModel("toy", 10, 1, 10.0, 20.0, 10.0 * 16, 100.0, 2, 16, (16, 64))


def batch(*requests: tuple[int, int]) -> Batch:
    return Batch(*np.array(requests).T)


def outcome(of: Batch, shape: AttentionShape = SHAPE, device: DeviceModel = H100):
    planner = Planner(shape, device, page_size=16)
    return planner.outcome(of, planner.plan(of))


def test_units_take_the_next_task_as_they_get_free():
    assert list_makespan([5.0, 3.0, 3.0, 2.0, 2.0], 2) == 8.0  # 5 + 2, 3 + 3 + 2
    assert list_makespan([2.0, 2.0, 3.0, 3.0, 5.0], 2) == 10.0
    assert list_makespan([4.0], 3) == 4.0


def test_the_ideal_reads_each_key_once_and_multiplies_each_visible_pair_once():
    shape = AttentionShape(1, 1, 128, 128)
    row, key, pair = 512.0, 512.0, 2 * 256 / 16
    assert ideal_seconds(batch((1, 40)), shape, TOY) == pytest.approx((row + 40 * key) / 10)
    # 64 queries after 36 tokens: 37 + .. + 100 pairs are more than 100 keys
    pairs = sum(range(37, 101))
    assert ideal_seconds(batch((64, 100)), shape, TOY) == pytest.approx((64 * row + max(100 * key, pairs * pair)) / 10)
    windowed = dataclasses.replace(shape, window=10)
    expected = (64 * row + max(73 * key, 640 * pair)) / 10
    assert ideal_seconds(batch((64, 100)), windowed, TOY) == pytest.approx(expected)
    assert ideal_seconds(batch((0, 100), (1, 40)), shape, TOY) == ideal_seconds(batch((1, 40)), shape, TOY)


def test_an_outcome_adds_up():
    for device in (H100, cpu(2)):
        result = outcome(batch((1, 900), (1, 70), (300, 1000), (7, 7)), device=device)
        assert result.makespan == pytest.approx(result.ideal + result.extra + result.overhead + result.idle)
        assert min(result.overhead, result.idle, result.ideal) > 0


def test_no_plan_beats_the_ideal():
    generator = np.random.default_rng(0)
    for _ in range(50):
        requests = [
            (int(q), int(q + prefix)) for q, prefix in generator.integers(1, 400, (generator.integers(1, 9), 2))
        ]
        for device in (H100, cpu(2), cpu(7)):
            assert outcome(batch(*requests), device=device).ratio >= 1
            assert simulate_grid(batch(*requests), SHAPE, device).ratio >= 1


@pytest.mark.parametrize("decodes", [8, 20, 33, 50, 77, 128, 200])
@pytest.mark.parametrize("chunk", [None, (512, 512), (300, 1800)])
def test_units_are_busy_to_the_end(decodes, chunk):
    lens = np.random.default_rng(decodes).integers(300, 3000, decodes)
    requests = [(1, int(n)) for n in lens] + ([] if chunk is None else [chunk])
    result = outcome(batch(*requests))
    assert result.idle <= 0.05 * result.makespan
    assert result.makespan <= 1.1 * (result.ideal + H100.task_overhead)


def test_a_grid_is_cut_along_the_keys_only_if_all_are_decodes_and_few():
    assert simulate_grid(batch((1, 4096), (1, 4096)), SHAPE, H100).tasks == 2 * 8 * 16
    assert simulate_grid(batch((1, 4096), (1, 20)), SHAPE, H100).tasks == (16 + 2) * 8  # no empty segment
    assert simulate_grid(batch((1, 4096), (2, 4096)), SHAPE, H100).tasks == 2 * 8
    assert simulate_grid(batch(*[(1, 4096)] * 40), SHAPE, H100).tasks == 40 * 8
    assert simulate_grid(batch((512, 512)), SHAPE, H100).tasks == 128 * 8  # 4 tokens x group of 4


def test_a_grid_takes_requests_in_order():
    # One long decode behind many short ones keeps one slot busy when all others are done.
    late = simulate_grid(batch(*[(1, 100)] * 200, (1, 9000)), SHAPE, H100)
    assert late.idle > 0.3 * late.makespan


def test_blocks_of_a_request_share_reads_from_memory():
    tasks = np.array([[0, 0, 0, 16, 0, 32, -1, -1], [0, 0, 16, 32, 0, 32, -1, -1]])
    shape = AttentionShape(1, 1, 128, 128)
    slow_memory = dataclasses.replace(TOY, matrix_rate=1e9)
    result = simulate(tasks, np.array([2]), batch((32, 32)), shape, slow_memory)
    assert result.makespan == pytest.approx(100 + 16 * 512 + 32 * (512 + 256) / 2)


def test_simulating_a_plan_counts_its_blocks():
    planner = Planner(AttentionShape(4, 2, 64, 64), cpu(2), page_size=16, q_block=16)
    of = batch((40, 100), (1, 50), (0, 9))
    table = planner.plan(of)
    assert len(table.tasks) == (5 + 1) * 2
    direct = simulate(table.tasks.numpy(), np.array([5, 1, 1]), of, planner.shape, planner.device)
    assert simulate_plan(table, of, planner.shape, planner.device) == direct


def test_the_command_prints_plan_and_grid(capsys):
    assert main("plan --decodes 4x300 17 --prefills 2x40@8 33 --heads 8/2/64 --device 3".split()) == 0
    out = capsys.readouterr().out
    assert out.startswith("8/2/64, page size 16, on cpu (3 units): 5 decodes, 3 prefills, 118 new tokens")
    for line in ("makespan / ideal", "pieces of cut blocks", "planning, us", "vLLM-style grid"):
        assert line in out


def test_options_reach_the_planner(capsys):
    arguments = "plan --decodes 512 --device h200 --heads 4/1/64/32 --kv-split 64 --window 256 --overhead 0.5"
    assert main(arguments.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    ours = {line[:30].strip(): line[30:].split()[0] for line in lines[4:] if line[30:].split()}
    # of 512 keys the window shows 256, which make 4 pieces of 64
    assert (ours["of decodes"], ours["merges"], ours["most keys of a decode's task"]) == ("4", "1", "64")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--decodes many", "--decodes takes for example 128x2048"),
        ("--decodes 3x0", "--decodes takes for example"),
        ("--prefills 0@5", "--prefills takes for example 2048@0"),
        ("--decodes", "there is nothing to plan"),
        ("--heads 9/2/64", "cannot share 2 key/value heads evenly"),
        ("--heads 9/3", "--heads must be"),
        ("--device tpu", "--device must be"),
        ("--device 0", "--device must be"),
        ("--overhead -1", "--overhead must be 0 or more"),
        ("--overhead nan", "--overhead must be 0 or more"),
        ("--rate -1", "--rate and --parameters must be positive"),
        ("--rate inf", "--rate and --parameters must be positive"),
        ("--decodes 1x99999999999", "at most 1000000 requests of 2147483647 tokens"),
        ("--decodes 99999999999x1", "at most 1000000 requests of 2147483647 tokens"),
        ("--prefills 1000000000@0", "a plan has at most 2147483647 rows"),
        ("--window x", "must be an integer >= 0, not 'x'"),
        ("--q-block 0", "must be an integer >= 1, not '0'"),
        ("--trace nowhere.csv", "cannot read the trace nowhere.csv"),
        ("--trace nowhere.csv --decodes 5", "leave out --decodes"),
        ("--trace nowhere.csv --rate 0", "--rate and --parameters must be positive"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["plan", *arguments.split()])
    except SystemExit as exit:
        code = exit.code
    lines = capsys.readouterr().err.splitlines()
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("chunkc.bench: ") and said in lines[0]
