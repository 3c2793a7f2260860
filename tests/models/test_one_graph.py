"""One graph a kind of layer serves every number of tokens; serving compiles nothing, and the logits are right."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from serving import with_cache
from tiny import VOCAB, build
from torch._dynamo.utils import counters

import chunkc
from chunkc import artifacts
from chunkc.config import EngineConfig, SamplingParams
from chunkc.lower import compile_counter
from chunkc.runtime.batch import PackedBatch
from chunkc.runtime.deferred_logits import rows_of
from chunkc.runtime.engine import Engine

LARGEST = 600


class Recorder:
    """A runner that keeps the last batch and its logits."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.vocab_size, self.max_positions = inner.vocab_size, inner.max_positions
        self.page_size, self.num_pages, self.num_parts = inner.page_size, inner.num_pages, inner.num_parts
        self.machine = inner.machine
        self.batch: PackedBatch | None = None
        self.logits: torch.Tensor | None = None

    def run(self, batch: PackedBatch) -> torch.Tensor:
        self.batch, self.logits = batch, rows_of(self.inner.run(batch))
        return self.logits


def compilations() -> dict[str, Any]:
    """Everything that torch and chunkc count when something is compiled."""
    return {"chunkc": compile_counter.graphs, "torch": copy.deepcopy({k: dict(v) for k, v in counters.items()})}


def asked_of_inductor(counted: dict[str, Any]) -> int:
    """How many graphs Inductor was asked for, in the result of ``compilations``."""
    return counted["torch"].get("aot_autograd", {}).get("total", 0)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """(model, engine, how many graphs chunkc and Inductor compiled for it), with nothing kept from earlier."""
    model = build("llama", max_position_embeddings=1024, num_hidden_layers=3)
    before = compilations()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(artifacts, "cache_dir", lambda: tmp_path_factory.mktemp("cache"))
        engine = chunkc.compile(model, num_pages=64)
    after = compilations()
    return model, engine, (after["chunkc"] - before["chunkc"], asked_of_inductor(after) - asked_of_inductor(before))


def test_each_kind_of_part_is_compiled_once(compiled):
    """The embedding, two layers that are alike, and the last layer with the head."""
    assert compiled[2] == (3, 3)


def test_what_a_token_costs_is_counted_from_the_weights(compiled):
    """Two operations a weight of a layer, be it packed or not; and attention grows with the position."""
    model, engine, _ = compiled
    layer = sum(parameter.numel() for parameter in model.model.layers[1].parameters())
    assert engine.runner.linear_operations == 3 * 2 * layer
    attention = 2 * (16 + 16) * 4  # operations of a key for all heads
    costs = engine.runner.row_costs(np.array([0, 99]))
    np.testing.assert_allclose(costs, [1 + attention / (2 * layer), 1 + 100 * attention / (2 * layer)])


def test_no_number_of_tokens_compiles_anything(compiled):
    """Step after step of 1, 2, ... 600 tokens, of one to five requests each, prompts and decodes."""
    model, engine, _ = compiled
    runner = Recorder(with_cache(engine, budget=None, page_size=16, num_pages=128).runner)
    engine = Engine(runner, config=EngineConfig(budget=None))
    generator = torch.Generator().manual_seed(0)
    before = compilations()
    for count in range(1, LARGEST + 1):
        prompts = [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in parts(count, 1 + count % 5)]
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_new_tokens=1))
        engine.step()
        assert runner.batch.num_tokens == count
        if count % 29 in (1, 2) or count == LARGEST:
            check_logits(model, prompts, runner.logits)
    assert not engine.has_unfinished()
    assert compilations() == before


def test_decodes_of_any_number_of_requests_compile_nothing(compiled):
    """As many decodes as 1, 2, ... 40 in a step, each of another length."""
    model, engine, _ = compiled
    runner = Recorder(with_cache(engine, budget=None, page_size=16, num_pages=256).runner)
    engine = Engine(runner, config=EngineConfig(budget=None))
    before = compilations()
    prompts = [[(7 * index + position) % VOCAB for position in range(1 + 3 * index)] for index in range(40)]
    names = []
    for prompt in prompts:
        names.append(engine.add_request(prompt, SamplingParams(max_new_tokens=45)))
        engine.step()
        assert runner.batch.num_tokens == len(prompt) + len(names) - 1
    while engine.has_unfinished():
        engine.step()
    assert compilations() == before
    last = [engine.completion(name) for name in names]
    with torch.no_grad():
        for completion in last[::13]:
            tokens = completion.prompt_token_ids + completion.token_ids
            logits = model(torch.tensor([tokens])).logits[0]
            expected = logits[len(completion.prompt_token_ids) - 1 : -1].argmax(-1).tolist()
            assert completion.token_ids == expected


def parts(count: int, pieces: int) -> list[int]:
    """``count`` as a sum of at most ``pieces`` different positive numbers."""
    sizes = []
    while count and pieces > 1:
        sizes.append(max(1, count // pieces - pieces))
        count, pieces = count - sizes[-1], pieces - 1
    return sizes + [count] * bool(count)


def check_logits(model: torch.nn.Module, prompts: list[list[int]], logits: torch.Tensor) -> None:
    """``logits`` [L, V] are the model's for each prompt's last token."""
    with torch.no_grad():
        expected = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)
