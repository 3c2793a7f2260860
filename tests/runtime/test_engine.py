"""The engine with the toy model: every way in, every way out."""

from __future__ import annotations

import gc
import warnings

import numpy as np
import pytest
import torch
from toy_runner import VOCAB, ToyRunner, toy_generate
from toy_tokenizer import EOS, ByteTokenizer

from chunkc.config import EngineConfig, SamplingParams
from chunkc.errors import ChunkcError, InvalidRequestError
from chunkc.runtime.engine import Engine


def engine_with(num_pages=200, page_size=4, *, budget=16, max_requests=32, **options) -> Engine:
    config = EngineConfig(budget=budget, max_requests=max_requests)
    return Engine(ToyRunner(num_pages, page_size), config=config, **options)


class Scripted(ToyRunner):
    """Says the tokens of a script, whatever the prompt."""

    vocab_size = 257

    def __init__(self, script: list[int], **options) -> None:
        super().__init__(**options)
        self.script = script

    def run(self, batch):
        super().run(batch)
        meta = batch.attention
        lens = meta.kv_lens[torch.searchsorted(meta.q_offsets, batch.logits_rows, right=True) - 1]
        logits = torch.zeros(len(batch.logits_rows), self.vocab_size)
        for row, length in enumerate(lens.tolist()):
            logits[row, self.script[(length - 1) % len(self.script)]] = 1.0
        return logits


def text_engine(says: str, **options) -> Engine:
    """An engine that answers a one-token prompt with a text and an end-of-sequence token."""
    tokenizer = ByteTokenizer()
    runner = Scripted([*tokenizer(says).input_ids, EOS])
    return Engine(runner, tokenizer=tokenizer, generation_config={"eos_token_id": EOS}, **options)


def finish(engine: Engine) -> dict[str, list]:
    events: dict[str, list] = {}
    while engine.has_unfinished():
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    engine.check()
    assert engine.pool.num_used == 0
    return events


# ---- generate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 3, 7, 64, None])
@pytest.mark.parametrize("page_size, num_pages", [(1, 70), (4, 20), (16, 6), (128, 2)])
def test_outputs_do_not_depend_on_budget_or_pages(budget, page_size, num_pages):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, size).tolist() for size in (1, 2, 15, 16, 17, 31, 40, 5)]
    params = [SamplingParams(max_new_tokens=n) for n in (20, 1, 17, 2, 9, 30, 12, 20)]
    engine = engine_with(num_pages, page_size, budget=budget)
    done = engine.generate(prompts, params)
    assert [c.token_ids for c in done] == [toy_generate(p, s) for p, s in zip(prompts, params, strict=True)]
    assert [c.prompt_token_ids for c in done] == prompts
    assert {c.finish_reason for c in done} == {"length"}
    engine.check()
    assert engine.pool.num_used == 0
    if page_size < 16 and budget not in (1, 3):  # with those, prompts come in too slowly to fight for pages
        assert engine.metrics.preemptions > 0, "the cache was meant to be too small"
        assert sum(c.metrics.num_preemptions for c in done) == engine.metrics.preemptions


def test_sampling_survives_preemption_and_company():
    params = [SamplingParams(do_sample=True, seed=n, max_new_tokens=25, top_k=0) for n in range(6)]
    prompts = [[n, n + 1, n + 2] for n in range(6)]
    engine = engine_with(num_pages=40, page_size=1)
    done = engine.generate(prompts, params)
    assert engine.metrics.preemptions > 0
    assert [c.token_ids for c in done] == [toy_generate(p, s) for p, s in zip(prompts, params, strict=True)]


def test_an_unset_seed_follows_torch():
    def draw():
        return engine_with().generate([5], {"do_sample": True, "max_new_tokens": 12})[0].token_ids

    torch.manual_seed(4)
    first, second = draw(), draw()
    torch.manual_seed(4)
    assert draw() == first != second


@pytest.mark.parametrize(
    "prompts, count",
    [
        ("abc", 1),
        (["abc", "d"], 2),
        ([5, 6, 7], 1),
        ((5, 6, 7), 1),
        ([[5, 6], [7]], 2),
        (np.array([5, 6]), 1),
        ([np.array([5, 6]), torch.tensor([7])], 2),
        ([np.int64(5), 6], 1),
        ([{"role": "user", "content": "hi"}], 1),
        ([[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]], 2),
        (["abc", [5, 6], [{"role": "user", "content": "hi"}]], 3),
        ([], 0),
    ],
    ids=str,
)
def test_what_a_prompt_may_be(prompts, count):
    done = text_engine("x").generate(prompts, {"max_new_tokens": 2})
    assert isinstance(done, list) and len(done) == count


def test_texts_and_chats_become_the_tokenizers_tokens():
    tokenizer = ByteTokenizer()
    chat = [{"role": "user", "content": "hi"}]
    done = text_engine("x").generate(["hé", chat], {"max_new_tokens": 1})
    assert done[0].prompt_token_ids == tokenizer("hé").input_ids
    assert done[1].prompt_token_ids == tokenizer("<user>hi<assistant>").input_ids


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "empty"),
        ("", "empty"),
        ([1, 257], "token 257 at place 1 .*0 to 256"),
        ([1, -1], "token -1 at place 1"),
        ([1, 2.0], r"item 1 of the prompt is 2.0 \(float\)"),
        ([1, True], "bool"),
        ([1, "a"], "item 1 of the prompt is 'a'"),
        ([1, None], "NoneType"),
        (7, "must be a string, a list of token ids"),
        (b"abc", "bytes"),
        ({"role": "user"}, "dict"),
        (np.zeros((2, 3), dtype=int), r"shape \(2, 3\)"),
        (np.zeros(3), "float64"),
        (
            list(range(1, 200)) * 100,
            "19900 tokens with max_new_tokens=1 does not fit: the model has 4096 positions",
        ),
        ([{"role": "user"}], "message 0 of the chat has no 'content'"),
    ],
    ids=str,
)
def test_bad_prompts_are_refused(prompt, message):
    engine = text_engine("x")
    for call in (engine.add_request, engine.stream):
        with pytest.raises(InvalidRequestError, match=message):
            call(prompt)
    assert not engine.has_unfinished()


def test_what_is_larger_than_the_cache_is_refused_and_blocks_nobody():
    engine = engine_with(num_pages=4, page_size=4)
    with pytest.raises(InvalidRequestError, match=r"cache holds 16 tokens; ask for at most 6 or enlarge"):
        engine.add_request([1] * 10, {"max_new_tokens": 7})
    with pytest.raises(InvalidRequestError, match=r"cache holds 16 tokens; shorten the prompt"):
        engine.add_request([1] * 16)
    name = engine.add_request([1] * 10, {"max_new_tokens": 6})
    finish(engine)
    assert len(engine.completion(name).token_ids) == 6


def test_a_length_that_nobody_asked_for_is_lowered_to_what_fits():
    done = engine_with(num_pages=4, page_size=4).generate([1] * 10)
    assert len(done[0].token_ids) == 6 and done[0].finish_reason == "length"


def test_a_string_without_a_tokenizer():
    engine = engine_with()
    with pytest.raises(InvalidRequestError, match="a string and the engine has no tokenizer"):
        engine.generate("abc")
    with pytest.raises(InvalidRequestError, match="a chat and the engine has no tokenizer"):
        engine.generate([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidRequestError, match="stop_strings need a tokenizer"):
        engine.generate([1], SamplingParams(stop_strings="x"))


def test_a_chat_template_that_raises():
    class NoTemplate(ByteTokenizer):
        def apply_chat_template(self, *args, **kwargs):
            raise ValueError("no chat template is set")

    engine = engine_with(tokenizer=NoTemplate())
    with pytest.raises(InvalidRequestError, match=r"no chat template is set.*pass text or token ids"):
        engine.generate([{"role": "user", "content": "x"}])


def test_errors_raise_checks_everything_first():
    engine = engine_with()
    with pytest.raises(InvalidRequestError, match="prompt 1: token 500"):
        engine.generate([[1, 2], [500]])
    with pytest.raises(InvalidRequestError, match="bad sampling parameters: top_p=3"):
        engine.generate([[1], [2]], [None, {"top_p": 3}])
    with pytest.raises(InvalidRequestError, match="3 sampling_params for 2 prompts"):
        engine.generate([[1], [2]], [None] * 3)
    with pytest.raises(InvalidRequestError, match=r"must be chunkc\.SamplingParams, not int"):
        engine.generate([1], 5)
    with pytest.raises(ValueError, match="errors must be"):
        engine.generate([1], errors="ignore")
    assert engine.metrics.steps == 0 and not engine.has_unfinished()


def test_errors_return_completes_the_rest():
    engine = engine_with()
    done = engine.generate([[1, 2], [], [3], [999]], {"max_new_tokens": 5}, errors="return")
    assert [c.finish_reason for c in done] == ["length", "error", "length", "error"]
    assert "empty" in done[1].error and "999" in done[3].error
    assert done[2].token_ids == toy_generate([3], SamplingParams(max_new_tokens=5))
    assert len({c.request_id for c in done}) == 4


def test_progress_bar(capsys):
    engine_with().generate([[1], [2]], {"max_new_tokens": 3}, progress=True)
    assert "2/2" in capsys.readouterr().err
    engine_with().generate([[1], [2]], {"max_new_tokens": 3})
    assert capsys.readouterr().err == ""


def test_an_interrupt_leaves_nothing_behind():
    engine = engine_with()
    engine.add_request([9], {"max_new_tokens": 3}, request_id="mine")

    def interrupt(batch):
        if engine.metrics.steps == 2:
            engine.runner.before = lambda batch: None
            raise KeyboardInterrupt

    engine.runner.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1], [2]], {"max_new_tokens": 30})
    engine.check()
    events = finish(engine)
    assert list(events) == ["mine"]
    assert engine.completion("mine").token_ids == toy_generate([9], SamplingParams(max_new_tokens=3))


# ---- how requests end ---------------------------------------------------------------------------------


def test_end_of_sequence():
    engine = text_engine("hello")
    done = engine.generate(["a"])[0]
    assert done.text == "hello" and done.finish_reason == "stop" and done.token_ids[-1] == EOS
    done = engine.generate(["a"], {"ignore_eos": True, "max_new_tokens": 8})[0]
    assert done.text == "hellohe" and done.finish_reason == "length" and len(done.token_ids) == 8
    done = engine.generate(["a"], {"eos_token_id": [99, ord("l") + 1]})[0]
    assert done.text == "hel" and done.finish_reason == "stop"


def test_stop_strings():
    engine = text_engine("one two. three")
    done = engine.generate(["a"], SamplingParams(stop_strings=[". ", "zzz"]))[0]
    assert done.text == "one two" and done.finish_reason == "stop"
    assert ByteTokenizer().decode(done.token_ids) == "one two. "
    events = list(engine.stream("a", SamplingParams(stop_strings=". ")))
    assert "".join(event.text for event in events) == "one two"
    assert [event.finish_reason for event in events] == [None] * 8 + ["stop"]


def test_a_possible_stop_string_at_the_end_is_text():
    done = text_engine("wait.").generate(["a"], SamplingParams(stop_strings="..."))[0]
    assert done.text == "wait." and done.finish_reason == "stop"


def test_characters_in_a_stream_are_whole():
    events = list(text_engine("aé漢😀").stream("a"))
    assert [event.text for event in events] == ["a", "", "é", "", "", "漢", "", "", "", "😀", ""]
    assert [event.index for event in events] == list(range(11))
    assert [event.finished for event in events] == [False] * 10 + [True]


def test_the_models_settings_that_are_not_applied_are_said_once():
    with pytest.warns(UserWarning, match="num_beams=4.*does not apply"):
        engine = engine_with(generation_config={"num_beams": 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.generate([1], {"max_new_tokens": 1})


# ---- by hand ------------------------------------------------------------------------------------------


def test_add_and_step():
    engine = engine_with()
    assert engine.step() == [] and not engine.has_unfinished()
    a = engine.add_request([1, 2], {"max_new_tokens": 3})
    b = engine.add_request([3], {"max_new_tokens": 1}, request_id="b", arrival_time=-100.0)
    assert engine.completion(a) is None and b == "b"
    events = finish(engine)
    assert [event.token_id for event in events[a]] == toy_generate([1, 2], SamplingParams(max_new_tokens=3))
    assert [(event.finished, event.finish_reason) for event in events["b"]] == [(True, "length")]
    assert engine.completion("b").metrics.ttft > 100
    with pytest.raises(KeyError, match="nobody"):
        engine.completion("nobody")


def test_ids_are_unique_among_the_unfinished():
    engine = engine_with()
    engine.add_request([1], {"max_new_tokens": 1}, request_id="x")
    with pytest.raises(InvalidRequestError, match="unfinished request 'x' already") as caught:
        engine.add_request([1], request_id="x")
    assert caught.value.request_id == "x"
    finish(engine)
    engine.add_request([2], {"max_new_tokens": 1}, request_id="x")
    finish(engine)
    assert engine.completion("x").prompt_token_ids == [2]
    for bad in ("", 5):
        with pytest.raises(InvalidRequestError, match="non-empty string"):
            engine.add_request([1], request_id=bad)
    # A name that was made up never collides with one that was chosen.
    engine.add_request([1], {"max_new_tokens": 1}, request_id="request-3")
    names = [engine.add_request([1], {"max_new_tokens": 1}) for _ in range(9)]
    assert len({*names, "request-3"}) == 10


def test_events_of_others_are_kept_for_step():
    engine = engine_with()
    mine = engine.add_request([4, 5], {"max_new_tokens": 2})
    engine.generate([[1], [2]], {"max_new_tokens": 6})
    assert engine.has_unfinished() and engine.completion(mine) is not None
    events = engine.step()
    assert [event.token_id for event in events] == toy_generate([4, 5], SamplingParams(max_new_tokens=2))
    assert not engine.has_unfinished()


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_no_token_after_an_abort_and_its_pages_are_free(steps):
    """At any point: waiting, in the middle of the prefill, decoding."""
    engine = engine_with(budget=8)
    engine.add_request([7], {"max_new_tokens": 30}, request_id="other")
    engine.add_request([1] * 20, {"max_new_tokens": 30}, request_id="gone")
    for _ in range(steps):
        engine.step()
    held = engine.pool.num_used
    done = engine.abort("gone")
    assert done.finish_reason == "abort"
    assert done.token_ids == toy_generate([1] * 20, SamplingParams(max_new_tokens=30))[: len(done.token_ids)]
    engine.check()
    assert engine.pool.num_used == (0 if steps == 0 else 1 + (steps > 3)) <= held
    assert list(finish(engine)) == ["other"]
    assert engine.abort("gone") is None and engine.abort("nobody") is None


def test_an_abort_drops_events_that_nobody_has_fetched():
    engine = engine_with()
    engine.add_request([1], {"max_new_tokens": 3}, request_id="x")
    engine.generate([2], {"max_new_tokens": 10})
    assert engine.abort("x") is None, "it had ended"
    assert engine.step() == [] and not engine.has_unfinished()


def test_an_abort_from_inside_a_step_waits_for_its_end():
    engine = engine_with()
    engine.add_request([1], {"max_new_tokens": 30}, request_id="x")
    engine.step()
    engine.runner.before = lambda batch: engine.abort("x") if batch.num_tokens else None
    assert engine.step() == []
    assert engine.completion("x").finish_reason == "abort" and len(engine.completion("x").token_ids) == 1
    engine.check()


def test_a_step_from_inside_a_step_is_refused():
    engine = engine_with()
    engine.add_request([1], {"max_new_tokens": 3}, request_id="x")
    engine.runner.before = lambda batch: engine.step()
    event = engine.step()[0]
    assert event.finish_reason == "error" and "inside a step" in event.error


def test_aborting_a_request_of_generate_ends_it_alone():
    engine = engine_with()

    def abort_first(batch):
        if engine.metrics.steps == 3:
            engine.abort("request-0")

    engine.runner.before = abort_first
    done = engine.generate([[1], [2]], {"max_new_tokens": 9})
    assert [c.finish_reason for c in done] == ["abort", "length"]
    assert len(done[0].token_ids) == 3


# ---- streams ------------------------------------------------------------------------------------------


def test_streams_side_by_side():
    engine = engine_with()
    streams = [engine.stream([n], {"max_new_tokens": 8}) for n in range(3)]
    rounds = list(zip(*streams, strict=True))
    for n, events in enumerate(zip(*rounds, strict=True)):
        assert [event.token_id for event in events] == toy_generate([n], SamplingParams(max_new_tokens=8))
    assert [stream.completion.finish_reason for stream in streams] == ["length"] * 3


@pytest.mark.parametrize("read", [0, 3])
def test_ending_a_stream_early_aborts_its_request(read):
    engine = engine_with()
    stream = engine.stream([1], {"max_new_tokens": 50})
    for _ in range(read):
        next(stream)
    stream.close()
    assert stream.completion.finish_reason == "abort" and engine.pool.num_used == 0
    assert list(stream) == [] and not engine.has_unfinished()

    with engine.stream([1], {"max_new_tokens": 50}) as stream:
        next(stream)
    assert engine.pool.num_used == 0

    for _ in engine.stream([1], {"max_new_tokens": 50}):
        break
    gc.collect()
    assert not engine.has_unfinished() and engine.pool.num_used == 0


def test_a_stream_dropped_inside_a_step_ends_later():
    engine = engine_with()
    holder = [engine.stream([1], {"max_new_tokens": 50})]
    next(holder[0])
    engine.runner.before = lambda batch: holder.clear()
    engine.generate([2], {"max_new_tokens": 3})
    assert not engine.has_unfinished()
    engine.check()


def test_a_finished_stream_is_not_aborted():
    engine = engine_with()
    stream = engine.stream([1], {"max_new_tokens": 3})
    assert len(list(stream)) == 3
    stream.close()
    assert engine.completion(stream.request_id).finish_reason == "length"


def test_an_aborted_stream_just_ends():
    engine = engine_with()
    stream = engine.stream([1], {"max_new_tokens": 30})
    next(stream)
    engine.step()
    engine.abort(stream.request_id)
    assert list(stream) == [] and stream.completion.finish_reason == "abort"


# ---- failures -----------------------------------------------------------------------------------------


def test_a_model_that_raises_fails_the_requests_of_that_step_only():
    engine = engine_with(budget=4, max_requests=2)
    for n in range(4):
        engine.add_request([n], {"max_new_tokens": 6}, request_id=str(n))
    engine.step()

    def fail(batch):
        engine.runner.before = lambda batch: None
        raise ZeroDivisionError("boom")

    engine.runner.before = fail
    events = finish(engine)
    for name in "01":
        assert events[name][-1].finish_reason == "error" and events[name][-1].token_id is None
        assert engine.completion(name).error == "the step failed with ZeroDivisionError: boom"
        assert len(engine.completion(name).token_ids) == 1
    for name in "23":
        assert engine.completion(name).token_ids == toy_generate([int(name)], SamplingParams(max_new_tokens=6))
    metrics = engine.metrics
    assert metrics.failed_steps == 1 and metrics.finished == {"error": 2, "length": 2}


def test_a_failure_raises_from_generate_and_from_a_stream():
    engine = engine_with()

    def fail(batch):
        raise ZeroDivisionError("boom")

    engine.runner.before = fail
    with pytest.raises(ChunkcError, match="boom") as caught:
        engine.generate([[1], [2]])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ChunkcError, match="boom"):
        list(engine.stream([1]))
    assert [c.error for c in engine.generate([1], errors="return")] == ["the step failed with ZeroDivisionError: boom"]
    engine.check()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_logits_fail_their_request_only(value):
    engine = engine_with()

    def spoil(logits, batch):
        if engine.metrics.steps == 3:
            logits[1, 5] = value

    engine.runner.after = spoil
    done = engine.generate([[1], [2], [3]], {"max_new_tokens": 6}, errors="return")
    assert [c.finish_reason for c in done] == ["length", "error", "length"]
    assert done[1].error == "the model's logits for token 3 are not finite" and len(done[1].token_ids) == 3
    assert done[2].token_ids == toy_generate([3], SamplingParams(max_new_tokens=6))
    engine.check()


def test_logits_of_a_wrong_shape_are_an_error_of_the_step():
    engine = engine_with()
    engine.runner.run = lambda batch: torch.zeros(7, VOCAB)
    done = engine.generate([1], errors="return")[0]
    assert "logits of shape (7, 97) for 1 requests" in done.error


def test_a_tokenizer_that_raises_fails_its_request_only():
    class Picky(ByteTokenizer):
        def decode(self, ids, skip_special_tokens=False):
            if len(ids) == 3 and ids[0] == ord("o") + 1:
                raise KeyError("x")
            return super().decode(ids, skip_special_tokens)

    tokenizer = Picky()
    runner = Scripted([*tokenizer("one two").input_ids, EOS])
    engine = Engine(runner, tokenizer=tokenizer, generation_config={"eos_token_id": EOS})
    done = engine.generate([[1], [1, 1]], errors="return")
    assert [c.finish_reason for c in done] == ["error", "stop"]
    assert "tokenizer failed with KeyError" in done[0].error and done[1].text == "ne two"


# ---- looking and turning ------------------------------------------------------------------------------


def test_metrics():
    engine = engine_with(budget=4)
    done = engine.generate([[1] * 6, [2]], {"max_new_tokens": 3})
    metrics = engine.metrics
    shape = [(r.decode_tokens, r.prefill_tokens, r.requests) for r in metrics.records]
    assert shape == [(0, 4, 1), (0, 3, 2), (2, 0, 2), (2, 0, 2)]
    assert metrics.steps == 4 and metrics.prefill_tokens == 7 and metrics.decode_tokens == 4
    assert metrics.finished == {"length": 2} and metrics.running == metrics.waiting == metrics.pages_used == 0
    for record in metrics.records:
        assert 0 <= record.schedule_s + record.run_s <= record.total_s and record.overhead_s >= 0
        assert record.budget == 4 and record.pages_used > 0
    assert metrics.summary()["decode_tokens_per_step"] == 1.0
    for completion in done:
        m = completion.metrics
        assert m.arrival <= m.first_scheduled <= m.first_token <= m.finished
        assert len(m.token_times) == 3 and len(m.itl) == 2 and min(m.itl) > 0
        assert m.token_times[0] == m.first_token and 0 <= m.queue_time <= m.ttft
    engine.reset_metrics()
    assert engine.metrics.steps == 0 and engine.metrics.summary()["step_ms"] == 0


def test_budget():
    engine = engine_with(budget=4)
    engine.add_request([1] * 20)
    engine.step()
    engine.budget = 10
    engine.step()
    engine.budget = None
    engine.step()
    assert [record.prefill_tokens for record in engine.metrics.records] == [4, 10, 6]
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ValueError, match="budget"):
            engine.budget = bad
    assert engine.budget is None


def test_explain_shows_the_report():
    assert engine_with().explain().startswith("no compile report\n\nmultiplex 'off'")
    assert engine_with(report="a table").explain().startswith("a table\n")


def test_a_configuration_that_contradicts_the_runner():
    with pytest.raises(ValueError, match="page_size=8, the runner has 4"):
        Engine(ToyRunner(10, 4), config=EngineConfig(page_size=8))
    with pytest.raises(ValueError, match="num_pages=9, the runner has 10"):
        Engine(ToyRunner(10, 4), config=EngineConfig(num_pages=9))


def test_the_clock_can_be_virtual():
    now = iter(range(10_000))
    engine = engine_with(clock=lambda: float(next(now)))
    done = engine.generate([1], {"max_new_tokens": 2})
    assert done[0].metrics.ttft == int(done[0].metrics.ttft) > 0


def test_completions_are_kept_for_a_while(monkeypatch):
    monkeypatch.setattr("chunkc.runtime.core.KEPT_COMPLETIONS", 3)
    engine = engine_with()
    names = [engine.add_request([n], {"max_new_tokens": 1}) for n in range(5)]
    finish(engine)
    assert [engine.completion(name).prompt_token_ids for name in names[2:]] == [[2], [3], [4]]
    with pytest.raises(KeyError):
        engine.completion(names[0])
    assert len(engine.generate([[n] for n in range(9)], {"max_new_tokens": 1})) == 9
