from __future__ import annotations

import time

import pytest

from chunkc.bench.clock import generate_one_by_one, serve
from chunkc.bench.workload import Request, Workload

MIXED = Workload("mixed", (Request(0.0, (1, 2), 5), Request(0.0, (3,), 2), Request(0.05, (4,) * 20, 3)))


def test_every_request_gets_its_tokens_with_times_that_rise(engine):
    trace = serve(engine, MIXED)
    assert trace.tokens == [[2, 3, 4, 5, 6], [1, 2], [20, 21, 22]]
    assert [len(times) for times in trace.times] == [len(tokens) for tokens in trace.tokens]
    assert all(times == sorted(times) for times in trace.times)
    assert trace.steps == len(engine.tokens_per_step)
    assert (trace.decode_tokens, trace.prefill_tokens) == (4 + 1 + 2, 2 + 1 + 20)


def test_only_the_steps_of_the_run_itself_are_counted(engine):
    first, second = serve(engine, MIXED), serve(engine, MIXED)
    assert (second.steps, second.decode_tokens) == (first.steps, first.decode_tokens)


def test_a_request_is_added_when_its_time_has_come_and_dated_by_its_arrival(engine):
    trace = serve(engine, MIXED)
    assert min(trace.times[2]) >= 0.05
    assert [added[3] for added in engine.added] == [
        pytest.approx(trace.started + request.arrival_s) for request in MIXED.requests
    ]


def test_requests_are_greedy_and_ignore_the_end_of_sequence(engine):
    serve(engine, MIXED)
    for (_, _, params, _), request in zip(engine.added, MIXED.requests, strict=True):
        assert params.max_new_tokens == request.max_new_tokens
        assert params.ignore_eos and not params.do_sample


def test_while_nothing_has_arrived_no_step_is_taken(engine):
    trace = serve(engine, Workload("late", (Request(0.03, (1,), 1), Request(0.06, (1,), 1))))
    assert trace.steps == 2


def test_a_request_that_fails_ends_the_benchmark(engine, monkeypatch):
    from chunkc.runtime.outputs import TokenEvent

    failed = TokenEvent("r0", None, 0, finished=True, finish_reason="error", error="out of luck")
    monkeypatch.setattr(engine, "step", lambda: [failed])
    with pytest.raises(RuntimeError, match=r"request 0 .* failed: out of luck"):
        serve(engine, Workload("w", (Request(0.0, (1,), 1),)))


def test_generate_serves_in_order_of_arrival_and_leaves_the_model_as_it_was():
    class Config:
        eos_token_id, pad_token_id = 2, None

    class Model:
        generation_config = Config()
        calls: list[tuple] = []  # noqa: RUF012

        def generate(self, input_ids, attention_mask, do_sample, max_new_tokens, streamer):
            assert self.generation_config.eos_token_id is None and not do_sample
            assert attention_mask.shape == input_ids.shape
            self.calls.append((time.perf_counter(), input_ids.tolist()))
            streamer.put(input_ids)
            for token in range(max_new_tokens):
                streamer.put(input_ids.new_tensor([token]))
            streamer.end()

    model = Model()
    trace = generate_one_by_one(model, MIXED)
    assert trace.tokens == [[0, 1, 2, 3, 4], [0, 1], [0, 1, 2]]
    assert trace.steps is None
    assert [ids for _, ids in model.calls] == [[list(r.prompt_token_ids)] for r in MIXED.requests]
    assert model.calls[2][0] - trace.started >= 0.05
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, None)
