from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkc.bench.clock import Trace
from chunkc.bench.metrics import first_difference, measure, median, peak_rss_mb, percentile, spread
from chunkc.bench.workload import Request, Workload

MIXED = Workload("mixed", (Request(0.0, (1, 2), 3), Request(1.0, (3,) * 10, 2)))
TRACE = Trace(
    times=[[0.5, 0.6, 0.8], [1.5, 1.6]],
    tokens=[[7, 8, 9], [5, 6]],
    steps=4,
    decode_tokens=3,
    prefill_tokens=12,
)


def result(trace=TRACE, workload=MIXED, **changes):
    named = {"config": "c", "dtype": "float32", "budget": 64, "run": 0, "compile_s": 1.234, **changes}
    return measure(trace, workload, **named)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_percentile_is_numpys(values, fraction):
    assert percentile(values, fraction) == pytest.approx(np.percentile(values, 100 * fraction), abs=1e-6)


def test_percentile_of_nothing_is_none():
    assert percentile([], 0.5) is None


def test_the_figures_of_a_mixed_run():
    r = result()
    assert (r.wall_s, r.prompt_tok_s, r.output_tok_s) == (1.6, 7.5, 3.1)
    assert (r.ttft_p50_ms, r.ttft_p99_ms) == (500.0, 500.0)
    assert (r.itl_p50_ms, r.itl_max_ms) == (100.0, 200.0)
    assert (r.dec_itl_p50_ms, r.dec_itl_p99_ms) == (150.0, 199.0)
    assert r.long_ttft_p50_ms == 500.0
    assert (r.steps, r.decode_per_step, r.prefill_per_step) == (4, 0.75, 3.0)


def test_figures_that_a_workload_does_not_have_are_none():
    one_token_each = Workload("w", (Request(0.0, (1,), 1), Request(0.0, (1,), 1)))
    r = result(Trace(times=[[0.5], [0.6]], tokens=[[1], [1]]), one_token_each)
    assert r.itl_p50_ms is r.itl_p99_ms is r.itl_max_ms is r.dec_itl_p50_ms is r.long_ttft_p50_ms is None
    assert r.steps is r.decode_per_step is None


def test_the_json_object_has_the_documented_fields():
    documented = """config workload dtype budget run wall_s prompt_tok_s output_tok_s ttft_p50_ms ttft_p99_ms
        itl_p50_ms itl_p99_ms itl_max_ms dec_itl_p50_ms dec_itl_p99_ms long_ttft_p50_ms peak_rss_mb compile_s
        tokens"""
    assert list(result().to_json()) == documented.split()
    assert result().to_json()["tokens"] == [[7, 8, 9], [5, 6]]


def test_a_request_without_all_its_tokens_is_an_error():
    with pytest.raises(RuntimeError, match=r"request 1 .* got 1 tokens in place of 2"):
        result(replace(TRACE, tokens=[[7, 8, 9], [5]]))


def test_medians_and_spread_over_runs():
    runs = [replace(result(), wall_s=wall) for wall in (2.0, 1.0, 1.5)]
    assert median(runs, "wall_s") == 1.5
    assert spread(runs, "wall_s") == pytest.approx(1 / 1.5)
    assert median([replace(runs[0], itl_p50_ms=None)], "itl_p50_ms") is None
    assert spread([replace(runs[0], itl_p50_ms=None)], "itl_p50_ms") is None


def test_first_difference_names_request_and_token():
    other = replace(result(), tokens=[[7, 8, 9], [5, 7]])
    assert first_difference(result(), result()) is None
    assert first_difference(result(), other) == (1, 1)


def test_peak_memory_is_that_of_a_python_with_numpy():
    assert 20 < peak_rss_mb() < 2**20
