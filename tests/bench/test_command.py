"""The command line, with a stand-in for the model and the engine."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from toy_runner import ToyRunner

import chunkc
from chunkc.bench import serve
from chunkc.bench.__main__ import main
from chunkc.runtime.engine import Engine


@pytest.fixture
def fake_model(monkeypatch, engine):
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50)))
    monkeypatch.setattr(serve, "load", lambda name, dtype: (model, None))
    monkeypatch.setitem(vars(chunkc), "compile", lambda model, **options: engine)
    return engine


@pytest.fixture
def workload(tmp_path):
    entry = {"arrival_s": 0.0, "prompt_token_ids": list(range(4)), "max_new_tokens": 6}
    late = {"arrival_s": 0.01, "prompt_token_ids": list(range(40)), "max_new_tokens": 2}
    file = tmp_path / "w.json"
    file.write_text(json.dumps({"small": [entry, late], "other": [entry]}))
    return file


def test_a_run_prints_the_table_and_writes_a_line_per_run(fake_model, workload, tmp_path, capsys):
    record = tmp_path / "out.jsonl"
    arguments = f"--workload {workload} --which small --budget whole 8 16 --repeat 2 --no-hf --json {record}"
    assert main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "whole prefill" in out and "budget 8" in out and "budget 16" in out and "HF generate" not in out
    assert "Tokens: equal in all 6 runs of 3 configurations." in out
    assert out.splitlines()[-1].startswith("Decode ITL p99: whole prefill")
    runs = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(run["config"], run["budget"], run["run"]) for run in runs] == [
        ("whole prefill", None, 0),
        ("budget 8", 8, 0),
        ("budget 16", 16, 0),
        ("whole prefill", None, 1),
        ("budget 8", 8, 1),
        ("budget 16", 16, 1),
    ]
    assert {run["workload"] for run in runs} == {"small"}
    assert runs[0]["tokens"] == [[4, 5, 6, 7, 8, 9], [40, 41]]
    # three warm-ups of two requests, six runs of two requests
    assert len(fake_model.added) == 6 + 12


def test_the_command_may_be_named_and_every_workload_gets_its_table(fake_model, workload, capsys):
    assert main(["serve", "--workload", str(workload), "--budget", "8", "--repeat", "1", "--no-hf"]) == 0
    out = capsys.readouterr().out
    assert "small: 2 requests" in out and "other: 1 requests" in out


def test_the_builtin_workload_needs_no_file(fake_model, monkeypatch, capsys):
    monkeypatch.setattr("chunkc.bench.workload.LONG_ARRIVALS_S", (0.001, 0.002))
    assert main("--budget whole 64 --repeat 1 --no-hf".split()) == 0
    assert "built-in: 8 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        ("--dtype float8", "argument --dtype: invalid choice: 'float8'"),
        ("--budget 0", "must be an integer >= 1, not '0'"),
        ("--budget many", "must be an integer >= 1, not 'many'"),
        ("--repeat -1", "--repeat"),
        ("--threads 1.5", "must be an integer >= 1, not '1.5'"),
        ("--workload nowhere.json", "cannot read the workload nowhere.json"),
        ("--which a", "give --workload as well"),
        ("--json no/such/folder/x", "cannot write no/such/folder/x"),
        ("--model ./nowhere", "there is no model at nowhere"),
        ("kernel --quick", "there is no command 'kernel'; there are: serve, plan, kernels,"),
        ("serve frobnicate", "unrecognized arguments: frobnicate"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(arguments, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    try:
        code = main(arguments.split())
    except SystemExit as exit:
        code = exit.code
    said_lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("chunkc.bench: ")]
    assert code == 2
    assert len(said_lines) == 1 and said in said_lines[0]


def test_every_mode_gets_a_row_and_the_trace_a_process(monkeypatch, tmp_path, capsys, two_cores):
    toy = Engine(ToyRunner(64, 4))
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=50)))
    monkeypatch.setattr(serve, "load", lambda name, dtype: (model, None))
    monkeypatch.setitem(vars(chunkc), "compile", lambda model, **options: toy)
    decoding = {"arrival_s": 0.0, "prompt_token_ids": list(range(4)), "max_new_tokens": 200}
    late = {"arrival_s": 0.01, "prompt_token_ids": list(range(40)), "max_new_tokens": 2}
    workload = tmp_path / "w.json"
    workload.write_text(json.dumps({"small": [decoding, late]}))
    trace = tmp_path / "trace.json"
    arguments = f"--workload {workload} --which small --budget whole 8 --repeat 2 --no-hf --trace {trace}"
    assert main([*arguments.split(), "--multiplex", "off", "layers", "streams"]) == 0
    out = capsys.readouterr().out
    assert "Tokens: equal in all 8 runs of 4 configurations." in out
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert processes == {"whole prefill": 1, "budget 8": 2, "budget 8, layers": 3, "budget 8, streams": 4}
    rows = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(3, "all cores"), (4, "decode cores"), (4, "prefill cores")} <= rows
    assert (2, "prefill cores") not in rows
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 0 and event["pid"] == 2]
    assert sum(step["args"]["prefill tokens"] for step in steps) == 44
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
