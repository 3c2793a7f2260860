from __future__ import annotations

import pickle

import pytest
from transformers import GenerationConfig

from chunkc.config import EngineConfig, GenerationDefaults, ResolvedSampling, SamplingParams, parse_memory
from chunkc.errors import InvalidRequestError


@pytest.mark.parametrize(
    "values, message",
    [
        ({"temperature": 0}, "temperature=0: .*greater than 0; for greedy decoding leave do_sample=False"),
        ({"temperature": float("nan")}, "temperature=nan: .*finite"),
        ({"temperature": "warm"}, "temperature='warm'"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_k": True}, "top_k=True: .*integer"),
        ({"min_p": -0.1}, "min_p=-0.1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**64}, "seed="),
        ({"eos_token_id": [1, -2]}, "eos_token_id=.*a token id .* or a list"),
        ({"eos_token_id": "</s>"}, "eos_token_id='</s>'"),
        ({"stop_strings": ""}, "stop_strings='': must be a non-empty string"),
        ({"stop_strings": ["a", 3]}, "stop_strings"),
        ({"temprature": 1.0}, "temprature is not a sampling parameter .*temperature"),
        ({"top_k": -1, "top_p": 7.0}, "top_k=-1.*top_p=7.0"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**values)


def test_sampling_params_are_values():
    params = SamplingParams(eos_token_id=[1, 2], stop_strings="x", temperature=1)
    assert params == SamplingParams(eos_token_id=(1, 2), stop_strings="x", temperature=1.0)
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    with pytest.raises(ValueError, match="frozen"):
        params.temperature = 2.0


def test_unset_values_are_those_of_generate():
    greedy = SamplingParams().resolve()
    assert greedy == ResolvedSampling(length_is_explicit=False) and not greedy.needs_processing
    drawn = SamplingParams(do_sample=True).resolve()
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (1.0, 50, 1.0, 0.0)
    hf = GenerationConfig._get_default_generation_params()
    assert {k: hf[k] for k in ("temperature", "top_k", "top_p", "repetition_penalty")} == {
        k: getattr(drawn, k) for k in ("temperature", "top_k", "top_p", "repetition_penalty")
    }


def test_the_models_defaults_come_between():
    model = GenerationDefaults.of(
        GenerationConfig(
            do_sample=True,
            temperature=0.6,
            top_p=0.9,
            eos_token_id=[5, 6],
            repetition_penalty=1.1,
            max_new_tokens=9,
        )
    )
    assert not model.not_applied
    drawn = SamplingParams(do_sample=True, top_p=0.5).resolve(model)
    assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_new_tokens) == (0.6, 0.5, 50, 9)
    assert drawn.eos_token_ids == {5, 6} and drawn.repetition_penalty == 1.1
    # Greedy unless do_sample=True, whatever the model says; a penalty counts then, too.
    greedy = SamplingParams().resolve(model)
    assert not greedy.do_sample and greedy.needs_processing and greedy.top_k == 0
    assert SamplingParams(ignore_eos=True).resolve(model).eos_token_ids == frozenset()
    assert SamplingParams(eos_token_id=3).resolve(model).eos_token_ids == {3}
    assert SamplingParams(repetition_penalty=1.0).resolve(model).repetition_penalty == 1.0


def test_a_models_bad_default_matters_only_where_it_is_used():
    model = GenerationDefaults.of({"temperature": 0.0})
    assert SamplingParams().resolve(model)
    with pytest.raises(InvalidRequestError, match="temperature"):
        SamplingParams(do_sample=True).resolve(model)


def test_values_that_bypassed_the_constructor_are_checked():
    with pytest.raises(InvalidRequestError, match="top_k=-3"):
        SamplingParams(do_sample=True).model_copy(update={"top_k": -3}).resolve()


def test_what_is_not_applied_is_known():
    config = GenerationConfig(num_beams=4, no_repeat_ngram_size=3, suppress_tokens=[7], min_length=0)
    assert GenerationDefaults.of(config).not_applied == {
        "num_beams": 4,
        "no_repeat_ngram_size": 3,
        "suppress_tokens": [7],
    }
    assert not GenerationDefaults.of(GenerationConfig()).not_applied
    assert not GenerationDefaults.of(GenerationConfig(**GenerationConfig._get_default_generation_params())).not_applied
    assert GenerationDefaults.of(None) == GenerationDefaults()


@pytest.mark.parametrize(
    "text, size",
    [
        ("2GiB", 2**31),
        ("512MB", 512_000_000),
        ("1.5 gib", 3 * 2**29),
        ("64", 64),
        ("10 kb", 10_000),
        (77, 77),
    ],
)
def test_memory_sizes(text, size):
    assert parse_memory(text) == size
    assert EngineConfig(cache_memory=text).cache_memory == size


@pytest.mark.parametrize("text", ["", "GiB", "2XB", "-1", "1e9", 0, -5, True, 1.5, "0"])
def test_bad_memory_sizes(text):
    with pytest.raises(ValueError, match="memory size"):
        parse_memory(text)


def test_engine_config():
    assert EngineConfig(budget=None).budget is None
    for values in ({"budget": 0}, {"num_pages": 0}, {"page_size": 0}, {"max_requests": 0}, {"bugdet": 1}):
        with pytest.raises(ValueError, match=next(iter(values))):
            EngineConfig(**values)
    with pytest.raises(ValueError, match=r"^bad engine options: num_pages and cache_memory both .* give one of them$"):
        EngineConfig(num_pages=3, cache_memory="1GiB")
    with pytest.raises(ValueError, match=r"^bad engine options: budget=0: input should be greater than or equal to 1$"):
        EngineConfig(budget=0)
    with pytest.raises(ValueError, match=r"^bad engine options: bugdet is not an option \(there are: budget, "):
        EngineConfig(bugdet=1)
