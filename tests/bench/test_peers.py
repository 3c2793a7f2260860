"""The comparison with other engines: alternation, the figures of drivers, ratios within a round, and clear errors."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from chunkc.bench import peers
from chunkc.bench.peers import OURS, Run
from chunkc.errors import ChunkcError

DRIVER = """
import json, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
for name in options["--which"].split(","):
    print("noise")
    print("RESULT " + json.dumps({"workload": name, "wall_s": 3.0, "dec_itl_p99_ms": None, "options": options}))
"""


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Two workloads, one peer that takes 3 s, and ours that takes 2 s in round 1 and 1 s in others."""
    request = {"arrival_s": 0, "prompt_token_ids": [1], "max_new_tokens": 1}
    (tmp_path / "work.json").write_text(json.dumps({"a": [request], "b": [request]}))
    (tmp_path / "driver.py").write_text(DRIVER)
    walls = iter([2.0] + [1.0] * 9)
    monkeypatch.setattr(peers, "wait_until_quiet", lambda longest: None)

    def ours(args, names, dtype):
        wall = next(walls)
        return iter([(name, {"wall_s": wall}) for name in names])

    monkeypatch.setattr(peers, "_ours", ours)
    parser = argparse.ArgumentParser()
    peers.add_arguments(parser)
    line = f"other={sys.executable} {tmp_path / 'driver.py'}"
    return parser.parse_args(["--workload", str(tmp_path / "work.json"), "--peer", line, "--json", str(tmp_path / "o")])


def test_rounds_alternate_and_ratios_are_taken_within_a_round(arguments, capsys):
    assert peers.run(arguments) == 0
    runs = [json.loads(line) for line in arguments.json.read_text().splitlines()]
    order = [run["name"] for run in runs if run["workload"] == "a"]
    assert order == [OURS, "other", "other", OURS, OURS, "other"]
    table = capsys.readouterr().out
    (row,) = [line.split() for line in table.splitlines() if line.startswith("float32  a           other")]
    assert row[3:] == ["3", "3.00", "(1.50-3.00)"]


def test_a_driver_that_fails_is_named_with_what_it_said(arguments, tmp_path):
    (tmp_path / "driver.py").write_text("raise SystemExit('no such model')")
    with pytest.raises(ChunkcError, match=r"failed \(1\)(.|\n)*no such model"):
        peers.run(arguments)


def test_a_driver_that_says_nothing_is_named(arguments, tmp_path):
    (tmp_path / "driver.py").write_text("")
    with pytest.raises(ChunkcError, match=r"driver.py .*printed no RESULT line"):
        peers.run(arguments)


@pytest.mark.parametrize("text", ["nothing", "=command", "name=", f"{OURS}=command"])
def test_a_peer_is_a_name_and_a_command(text):
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=COMMAND"):
        peers._peer(text)


def test_a_figure_that_is_missing_leaves_its_place_empty():
    runs = [Run(OURS, "float32", "a", 0, {"wall_s": 1.0}), Run("x", "float32", "a", 0, {"long_ttft_p50_ms": 5.0})]
    assert "5" in peers.report(runs)
