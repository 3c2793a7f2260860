from __future__ import annotations

from dataclasses import replace

from chunkc.bench.metrics import RunResult
from chunkc.bench.table import closing_line, compare_tokens, render

RUN = RunResult(
    config="whole prefill",
    workload="w",
    dtype="float32",
    budget=None,
    run=0,
    wall_s=2.0,
    prompt_tok_s=100.0,
    output_tok_s=50.0,
    ttft_p50_ms=10.0,
    ttft_p99_ms=900.0,
    itl_p50_ms=20.0,
    itl_p99_ms=800.0,
    itl_max_ms=810.0,
    dec_itl_p50_ms=20.0,
    dec_itl_p99_ms=800.0,
    long_ttft_p50_ms=850.0,
    peak_rss_mb=1000,
    compile_s=30.0,
    tokens=[[1, 2], [3]],
    steps=100,
    decode_per_step=5.5,
    prefill_per_step=27.25,
)
CHUNKED = replace(RUN, config="budget 64", budget=64, dec_itl_p99_ms=100.0)
GENERATE = replace(RUN, config="HF generate", steps=None, decode_per_step=None, prefill_per_step=None)


def test_the_table_has_a_row_per_configuration_with_medians_and_spread():
    text = render({"whole prefill": [RUN, replace(RUN, wall_s=4.0)], "HF generate": [GENERATE]})
    whole, generate = text.splitlines()[-2:]
    assert whole.split() == ("whole prefill 3.00 100 50.0 10 900 20.0 800.0 810 800.0 100 5.5 + 27.2 67%".split())
    assert generate.split() == "HF generate 2.00 100 50.0 10 900 20.0 800.0 810 800.0 - - 0%".split()


def test_the_table_fits_a_wide_terminal():
    assert max(map(len, render({"whole prefill": [RUN], "budget 4096": [CHUNKED]}).splitlines())) <= 120


def test_equal_tokens_are_said():
    said = compare_tokens({"whole prefill": [RUN, RUN], "budget 64": [CHUNKED]}, "float32")
    assert said == "Tokens: equal in all 3 runs of 2 configurations."


def test_tokens_that_part_are_said_with_the_place():
    other = replace(CHUNKED, run=1, tokens=[[1, 9], [3]])
    said = compare_tokens({"whole prefill": [RUN], "budget 64": [CHUNKED, other]}, "float32")
    assert "NOT equal" in said and "budget 64, run 1, request 0 from token 1" in said
    assert "bfloat16 rounds differently" in compare_tokens({"a": [RUN], "b": [other]}, "bfloat16")


def test_the_closing_line_gives_the_ratio():
    rows = {"whole prefill": [RUN], "budget 64": [CHUNKED]}
    said = closing_line(rows, "whole prefill", "budget 64")
    assert said == "Decode ITL p99: whole prefill 800 ms, budget 64 100 ms: a ratio of 8.0."


def test_without_decode_figures_the_closing_line_takes_all_requests():
    rows = {
        "whole prefill": [replace(RUN, dec_itl_p99_ms=None)],
        "budget 64": [replace(CHUNKED, dec_itl_p99_ms=None, itl_p99_ms=200.0)],
    }
    assert closing_line(rows, "whole prefill", "budget 64").endswith("a ratio of 4.0.")


def test_no_closing_line_without_both_rows():
    assert closing_line({"whole prefill": [RUN]}, "whole prefill", None) is None
    assert closing_line({"budget 64": [RUN]}, "whole prefill", "budget 64") is None
    no_itl = replace(RUN, dec_itl_p99_ms=None, itl_p99_ms=None)
    rows = {"whole prefill": [no_itl], "budget 64": [no_itl]}
    assert closing_line(rows, "whole prefill", "budget 64") is None
