"""The engine's state machine over a real model: nothing leaks, starves or is lost, and outputs are HuggingFace's."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from engine_machine import EngineMachine, Tracked
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from serving import with_cache
from tiny import VOCAB, Reference, build, generate_hf

import chunkc
from chunkc.config import EngineConfig, SamplingParams
from chunkc.runtime.engine import Engine

#: a window, so that what lies behind it must be right as well
MODEL = "mistral"


@lru_cache(maxsize=1)
def compiled() -> tuple[Any, Engine]:
    """(model, engine), made once for all runs of the machine."""
    model = build(MODEL)
    return model, chunkc.compile(model, mode="eager", num_pages=8)


@lru_cache(maxsize=100_000)
def reference(prompt: tuple[int, ...], params: SamplingParams) -> Reference:
    """What ``model.generate`` makes of a request."""
    model, _ = compiled()
    return generate_hf(model, prompt, params.max_new_tokens, eos_token_id=list(params.eos_token_id or ()) or None)


class TinyModelMachine(EngineMachine):
    """Greedy requests; the model may break, too."""

    vocab_size = VOCAB
    max_prompt, max_new = 12, 20
    samples = False

    def make_engine(self, *, num_pages: int, page_size: int, config: EngineConfig) -> Engine:
        """Over the graph that was compiled once."""
        _, engine = compiled()
        engine = with_cache(
            engine, budget=config.budget, page_size=page_size, num_pages=num_pages, max_requests=config.max_requests
        )
        self.runner = engine.runner
        return engine

    def requests(self, data: Any) -> Tracked:
        """Long outputs, most to the end, so that requests fight for pages; none that hangs on rounding."""
        token = st.integers(0, self.vocab_size - 1)
        prompt = data.draw(st.lists(token, min_size=1, max_size=self.max_prompt))
        new = data.draw(st.integers(1, self.max_new))
        whole = reference(tuple(prompt), SamplingParams(max_new_tokens=new))
        assume(min(whole.gaps) > 1e-4)
        eos = data.draw(st.one_of(st.just([]), st.lists(st.sampled_from(whole.tokens), max_size=1)))
        return Tracked(prompt, SamplingParams(max_new_tokens=new, eos_token_id=tuple(eos)))

    def expected(self, prompt: list[int], params: SamplingParams) -> list[int]:
        """Of HuggingFace."""
        return reference(tuple(prompt), params).tokens

    def fail_next_step(self) -> None:
        """Makes the graph raise once, before it has computed anything."""
        run = type(self.runner).run

        def fail(batch: object) -> None:
            self.runner.run = run.__get__(self.runner)
            raise RuntimeError("the model broke")

        self.runner.run = fail


class ApartMachine(TinyModelMachine):
    """With prefill apart from the decodes, and changes of mode at any moment."""

    modes = ("off", "layers", "streams", "streams")


class LongerMachine(ApartMachine):
    """The same, for more examples."""


pytestmark = pytest.mark.usefixtures("two_cores")


def limited(examples: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )


TestTinyModel = TinyModelMachine.TestCase
TestTinyModel.settings = limited(20)

TestTinyModelApart = ApartMachine.TestCase
TestTinyModelApart.settings = limited(20)

TestTinyModelLonger = pytest.mark.slow(LongerMachine.TestCase)
TestTinyModelLonger.settings = limited(300)
