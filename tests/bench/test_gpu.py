"""``bench gpu``: the same program on the CPU with a tiny model, and its limit of time."""

from __future__ import annotations

import json

import pytest

from chunkc.bench import gpu
from chunkc.bench.__main__ import main
from chunkc.bench.gpu import Deadline


def test_the_program_runs_on_the_cpu(two_cores, tmp_path, capsys):
    record = tmp_path / "figures.json"
    assert main(["gpu", "--device", "cpu", "--tiny", "--seconds", "9999", "--json", str(record)]) == 0
    out = capsys.readouterr().out
    figures = json.loads(record.read_text())
    names = ["off, budget 32", "off, budget whole", "layers, budget 32", "streams, 1 + 1"]
    assert figures["checks"] == dict.fromkeys(names, True) and figures["left_out"] == []
    assert "4 of 4 checks passed" in out and "streams, 1 + 1, 32" in out
    rows = ["decode alone", "one batch, 16", "whole", "layers, 16", "streams, 1 + 1, 32"]
    assert [row["row"] for row in figures["rows"]] == rows
    assert all(row["itl_p50_ms"] > 0 for row in figures["rows"])


def test_what_there_is_no_time_for_is_left_out_and_said():
    now = [0.0]
    deadline = Deadline(10, clock=lambda: now[0])
    assert deadline.allows("first", 8)
    now[0] = 4.0
    assert not deadline.allows("second", 8) and deadline.allows("third", 5)
    assert deadline.left_out == ["second"] and deadline.left == 6.0


def test_tokens_that_differ_are_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "check_tokens", lambda *_: {"off": True, "streams": False})
    monkeypatch.setattr(gpu, "measure_rows", lambda *_: [])
    assert main(["gpu", "--device", "cpu", "--tiny"]) == 1
    captured = capsys.readouterr()
    assert "1 of 2 checks passed" in captured.out and "FAILED: streams" in captured.err


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_without_the_device_it_says_so(device, capsys):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["gpu", "--device", device]) == 2
    assert "torch finds no device" in capsys.readouterr().err
