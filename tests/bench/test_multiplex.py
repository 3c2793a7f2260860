"""The multiplex benchmark, with the toy model in place of a real one."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from toy_runner import ToyRunner

import chunkc
from chunkc.bench import multiplex
from chunkc.bench.__main__ import main
from chunkc.bench.multiplex import Row, at_latency, compare
from chunkc.bench.multiplex_run import Load, Point, measure
from chunkc.config import DEFAULT_PAGE_SIZE
from chunkc.errors import ChunkcError
from chunkc.runtime.engine import Engine


@pytest.fixture
def toy(monkeypatch, two_cores):
    made = {}

    def compile_toy(model, *, num_pages):
        made["engine"] = Engine(ToyRunner(num_pages, DEFAULT_PAGE_SIZE))
        return made["engine"]

    monkeypatch.setattr(multiplex, "load", lambda name, dtype: (SimpleNamespace(), None))
    monkeypatch.setitem(vars(chunkc), "compile", compile_toy)
    return made


def test_every_row_is_measured_in_turn_and_written(toy, tmp_path, capsys):
    record, plot = tmp_path / "out.jsonl", tmp_path / "plot.svg"
    pytest.importorskip("matplotlib")
    arguments = "multiplex --decodes 2 --context 3 --prompt 20 --prompts 2 --budget 8 whole --layers 8 --streams 10"
    assert main([*arguments.split(), "--rounds", "2", "--json", str(record), "--plot", str(plot)]) == 0
    out = capsys.readouterr().out
    names = ["decode alone", "one batch, 8", "whole", "layers, 8", "streams, 10"]
    runs = [json.loads(line) for line in record.read_text().splitlines()]
    assert [run["row"] for run in runs] == names * 2
    by_name = {run["row"]: run for run in runs}
    assert by_name["decode alone"]["prefill_tok_s"] is None and by_name["decode alone"]["itl_p99_ms"] > 0
    # 20 tokens beside two decodes are chunks of 6, 6, 6 and 2; what comes before each is read again: 8 bytes a token
    assert by_name["one batch, 8"]["read_again_mb"] == pytest.approx(8 * (6 + 12 + 18) / 1e6, rel=0.2)
    assert by_name["whole"]["read_again_mb"] == 0
    assert by_name["streams, 10"]["read_again_mb"] == pytest.approx(8 * 10 / 1e6)
    assert all(name in out for name in names) and "contention" in out
    assert "<svg" in plot.read_text()
    assert not toy["engine"].has_unfinished()
    toy["engine"].check()


def test_a_run_counts_the_prompts_and_ends_the_decodes():
    engine = Engine(ToyRunner(64, 4))
    point = measure(engine, Load(decodes=2, context=3, prompt=10, prompts=3), steps=100)
    assert engine.metrics.prefill_tokens == 30 and point.prefill_tok_s > 0
    assert not engine.has_unfinished()


def test_decodes_that_are_too_short_are_an_error():
    engine = Engine(ToyRunner(64, 4))
    engine.budget = 3
    with pytest.raises(ChunkcError, match="the decodes ended before the prompts"):
        measure(engine, Load(decodes=2, context=3, prompt=60, prompts=3), steps=10)
    assert not engine.has_unfinished()


def test_throughput_at_a_latency_is_interpolated():
    curve = [(10.0, 100.0), (20.0, 300.0), (40.0, 200.0)]
    assert at_latency(curve, 5) is None
    assert at_latency(curve, 10) == 100
    assert at_latency(curve, 15) == 200
    assert at_latency(curve, 30) == 300, "no less than at a shorter latency"
    assert at_latency(curve, 100) == 300


def test_rows_are_compared_with_one_batch():
    def row(name, mode, p99, rate):
        return Row(name, mode, 1, [Point(1.0, p99, p99, rate, 0.0)])

    rows = [row("a", "off", 20.0, 100.0), row("b", "off", 40.0, 300.0)]
    assert "a ratio of 2.00" in compare([*rows, row("s", "streams", 30.0, 400.0)])[0]
    assert "no budget that fast" in compare([*rows, row("s", "streams", 10.0, 400.0)])[0]


def test_what_cannot_be_done_is_said_before_the_work(toy, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["multiplex", "--plot", str(tmp_path / "plot.doc")]) == 2
    assert "must end in one of" in capsys.readouterr().err
    assert main(["multiplex", "--plot", str(tmp_path / "no" / "plot.svg")]) == 2
    assert "no folder" in capsys.readouterr().err
    assert main("multiplex --decode-cores 99 --rounds 1".split()) == 2
    assert "decode_cores=99: must be 1 to" in capsys.readouterr().err
    assert not toy or not toy["engine"].has_unfinished()
