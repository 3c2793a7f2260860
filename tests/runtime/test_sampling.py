from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from chunkc.config import ResolvedSampling
from chunkc.runtime.deferred_logits import DeferredLogits
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.philox import philox4x32, uniforms
from chunkc.runtime.request import Request
from chunkc.runtime.sampling import Sampler, apply_repetition_penalty, filtered


def request_with(tokens=(1, 2, 3), generated=0, **sampling) -> Request:
    sampling = {"do_sample": True, "seed": 0, **sampling}
    prompt = np.array(tokens, dtype=np.int64)
    request = Request.create("r", 0, prompt, ResolvedSampling(**sampling), RequestMetrics(0.0))
    for token in range(generated):
        request.append(token)
    return request


def distribution(scores: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """float64 [n, V], what each request draws from."""
    penalised = scores.clone().numpy()
    apply_repetition_penalty(penalised, requests)
    weights, columns = filtered(penalised, requests)
    full = torch.zeros(scores.shape, dtype=torch.float64)
    tokens = torch.arange(scores.shape[1]).expand_as(scores) if columns is None else torch.from_numpy(columns)
    full.scatter_add_(1, tokens, weights)
    return full / full.sum(-1, keepdim=True)


def hf_scores(scores: torch.Tensor, request: Request) -> torch.Tensor:
    """What transformers' processors make of the scores, in the order in which generate applies them."""
    s = request.sampling
    processors = LogitsProcessorList()
    if s.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(s.repetition_penalty))
    if s.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(s.temperature))
    if s.top_k != 0:
        processors.append(TopKLogitsWarper(s.top_k))
    if s.top_p < 1.0:
        processors.append(TopPLogitsWarper(s.top_p))
    if s.min_p > 0:
        processors.append(MinPLogitsWarper(s.min_p))
    tokens = torch.from_numpy(request.tokens[: request.num_tokens])
    return processors(tokens[None], scores[None].clone())[0]


SETTINGS = [
    {},
    {"temperature": 0.3},
    {"temperature": 2.5, "top_k": 5},
    {"top_k": 50},
    {"top_k": 10_000},
    {"top_k": 1},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"top_p": 0.5, "top_k": 20},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"min_p": 0.05, "top_p": 0.95, "top_k": 40, "temperature": 0.7},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "top_k": 7},
    {"repetition_penalty": 1.8, "temperature": 1.4, "top_p": 0.8, "min_p": 0.02},
]


@pytest.mark.parametrize("vocab, spread", [(300, 4), (5000, 4), (5000, 0.1)], ids=str)
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_filters_agree_with_transformers(options, vocab, spread):
    torch.manual_seed(0)
    scores = torch.randn(6, vocab) * spread
    requests = [request_with(torch.randint(0, 300, (20,)).tolist(), **options) for _ in range(6)]
    ours = distribution(scores, requests)
    for row, request in enumerate(requests):
        theirs = hf_scores(scores[row], request)
        assert torch.equal(ours[row] > 0, theirs > -float("inf"))
        torch.testing.assert_close(ours[row].float(), theirs.softmax(-1), rtol=1e-5, atol=1e-7)


def test_tokens_that_tie_with_the_kth_stay_as_in_transformers():
    scores = torch.tensor([[1.0, 5.0, 3.0, 3.0, 3.0, 0.0]])
    request = request_with(top_k=2)
    ours = distribution(scores, [request])
    assert (ours[0] > 0).tolist() == (hf_scores(scores[0], request) > -float("inf")).tolist()
    assert (ours[0] > 0).sum() == 4


def test_rows_with_different_settings_in_one_call():
    torch.manual_seed(1)
    scores = torch.randn(8, 200) * 3
    narrow = [request_with(top_k=k, top_p=p) for k, p in [(3, 1.0), (50, 0.6), (7, 0.9), (1000, 1.0)]]
    wide = [request_with(top_p=p, min_p=m) for p, m in [(1.0, 0.0), (0.3, 0.0), (1.0, 0.2), (0.9, 0.01)]]
    for group, rows in ((narrow, scores[:4]), (wide, scores[4:])):
        together = distribution(rows, group)
        for row, request in enumerate(group):
            assert torch.equal(together[row], distribution(rows[row : row + 1], [request])[0])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_request_draws_the_same_whatever_it_is_batched_with(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    mine = request_with(generated=5, seed=11, **data.draw(st.sampled_from(SETTINGS)))
    logits = torch.randn(1, 120) * 2
    alone = Sampler().sample(logits, [mine]).token_ids[0]
    others = [request_with(seed=n, **data.draw(st.sampled_from(SETTINGS))) for n in range(data.draw(st.integers(0, 6)))]
    greedy = [request_with(do_sample=False) for _ in range(data.draw(st.integers(0, 3)))]
    batch = [*others, *greedy]
    at = data.draw(st.integers(0, len(batch)))
    rows = torch.randn(len(batch) + 1, 120) * 5
    rows[at] = logits
    assert Sampler().sample(rows, [*batch[:at], mine, *batch[at:]]).token_ids[at] == alone


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.6, "min_p": 0.1, "top_k": 9}], ids=str
)
def test_frequencies_follow_the_filtered_distribution(options):
    """Chi-squared over 20,000 draws of one request, token index by token index, and over as many seeds."""
    torch.manual_seed(2)
    scores = torch.randn(1, 12) * 1.5
    count = 20_000
    expected = distribution(scores, [request_with(**options)])[0].numpy() * count
    for seeds, indices in ((lambda n: 7, lambda n: n), (lambda n: n, lambda n: 3)):
        requests = []
        for n in range(count):
            request = request_with(seed=seeds(n), max_new_tokens=count, **options)
            request.num_tokens += indices(n)
            requests.append(request)
        counts = np.bincount(Sampler().sample(scores.expand(count, -1), requests).token_ids, minlength=12)
        assert (counts[expected == 0] == 0).all()
        kept = expected > 0
        chi = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
        freedom = kept.sum() - 1
        # Mean f and variance 2 f; six standard deviations and a margin for few degrees of freedom.
        assert chi < freedom + 6 * np.sqrt(2 * freedom) + 6


def test_seeds_and_indices_give_different_draws():
    draws = uniforms(np.repeat(np.arange(100, dtype=np.uint64), 100), np.tile(np.arange(100, dtype=np.uint64), 100))
    assert np.unique(draws).size == draws.size
    assert draws.min() >= 0 and draws.max() < 1 and abs(draws.mean() - 0.5) < 0.02
    large = uniforms(np.array([2**64 - 1, 2**32], dtype=np.uint64), np.array([0, 2**40], dtype=np.uint64))
    assert large[0] != large[1]


@pytest.mark.parametrize(
    "counter, key, result",
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter, key, result):
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert " ".join(f"{int(word):08x}" for word in words[:, 0]) == result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_maxima_as_torch_does(dtype):
    torch.manual_seed(3)
    logits = torch.randint(-3, 4, (40, 500)).to(dtype)
    requests = [request_with(do_sample=False)] * 40
    sampler = Sampler()
    for rows in (40, 3, 17):  # the work buffer is reused
        got = sampler.sample(logits[:rows], requests[:rows]).token_ids
        assert got == logits[:rows].float().argmax(-1).tolist()


def test_greedy_with_a_repetition_penalty():
    logits = torch.tensor([[5.0, 4.9, -1.0], [-1.0, -1.1, -3.0]])
    requests = [request_with((0,), do_sample=False, repetition_penalty=1.5)] * 2
    assert Sampler().sample(logits, requests).token_ids == [1, 1]
    assert logits[0, 0] == 5.0, "the runner's logits are not changed"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bad_rows_are_named_and_the_others_served(value, dtype):
    logits = torch.zeros(4, 10, dtype=dtype)
    logits[:, 3] = 1.0
    logits[1, 7] = value
    logits[2] = -float("inf")
    logits[3, :2] = -float("inf")  # fine: a model may exclude tokens
    requests = [
        request_with(do_sample=False),
        request_with(),
        request_with(top_k=3),
        request_with(do_sample=False),
    ]
    sampled = Sampler().sample(logits, requests)
    assert sampled.bad_rows == [1, 2]
    assert sampled.token_ids[0] == sampled.token_ids[3] == 3


def test_negative_nan_is_bad_too():
    logits = torch.zeros(1, 5)
    logits[0, 2] = -torch.tensor(float("nan"))
    assert Sampler().sample(logits, [request_with(do_sample=False)]).bad_rows == [0]


def test_excluded_tokens_are_never_drawn():
    logits = torch.full((200, 30), -float("inf"))
    logits[:, 4] = logits[:, 9] = 0.0
    for options in ({}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.5}):
        requests = [request_with(seed=n, **options) for n in range(200)]
        assert set(Sampler().sample(logits, requests).token_ids) == {4, 9}


def test_a_tiny_temperature_is_greedy_not_nan():
    logits = torch.randn(5, 50)
    requests = [request_with(temperature=1e-30, seed=n) for n in range(5)]
    assert Sampler().sample(logits, requests).token_ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("shape", [(3, 5), (2, 1, 5), (5,)])
def test_logits_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="for 2 requests"):
        Sampler().sample(torch.zeros(shape), [request_with()] * 2)


def test_the_best_alone_are_asked_for_only_where_they_are_enough():
    logits = torch.randn(2, 9)
    best = torch.argmax(logits, -1)
    asked = []

    def given(what, result):
        asked.append(what)
        return result

    deferred = DeferredLogits(
        2, lambda: given("rows", logits), lambda: given("best", (best, torch.tensor([1.0, float("nan")])))
    )
    greedy, drawn = request_with(do_sample=False), request_with()
    sampler = Sampler()
    sampled = sampler.sample(sampler.wanted(deferred, [greedy, greedy]), [greedy, greedy])
    assert asked == ["best"] and sampled.token_ids == best.tolist() and sampled.bad_rows == [1]
    sampled = sampler.sample(sampler.wanted(deferred, [greedy, drawn]), [greedy, drawn])
    assert asked == ["best", "rows"] and sampled.token_ids[0] == best[0] and not sampled.bad_rows
    penalised = request_with(do_sample=False, repetition_penalty=1.5)
    assert sampler.wanted(deferred, [penalised, greedy]) is logits
    with pytest.raises(ValueError, match="2 rows of logits for 1 requests"):
        sampler.wanted(deferred, [greedy])
