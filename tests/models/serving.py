"""Serving references with an engine, in the ways that must not change a token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tiny import Reference, assert_same_tokens

from chunkc.config import EngineConfig, SamplingParams
from chunkc.runtime.engine import Engine
from chunkc.runtime.multiplex import Mode
from chunkc.runtime.outputs import Completion
from chunkc.runtime.runner import GraphRunner


def with_cache(engine: Engine, *, budget: int | None, page_size: int, num_pages: int, max_requests: int = 64) -> Engine:
    """An engine over the same compiled graph with a cache of another size. Nothing is compiled."""
    runner = GraphRunner(
        engine.runner._graph,
        engine._report.layers,
        vocab_size=engine.runner.vocab_size,
        max_positions=engine.runner.max_positions,
        page_size=page_size,
        num_pages=num_pages,
    )
    config = EngineConfig(budget=budget, page_size=page_size, num_pages=num_pages, max_requests=max_requests)
    return Engine(runner, config=config, tokenizer=engine.tokenizer)


def pages_for(references: Sequence[Reference], page_size: int, share: float = 1.0) -> int:
    """Pages that hold this share of all the references' tokens, but at least the largest reference."""
    needed = [-(-(len(r.prompt) + len(r.tokens)) // page_size) for r in references]
    return max(max(needed), int(sum(needed) * share))


def serve(
    engine: Engine,
    references: Sequence[Reference],
    *,
    steps_between: int = 0,
    modes: Sequence[Mode] = ("off",),
) -> list[Completion]:
    """Serves every reference's prompt for as many tokens as it has; one arrives every ``steps_between`` steps, and
    the steps go through ``modes`` in turns."""
    names = []
    turns = itertools.cycle(modes)

    def step() -> None:
        engine.multiplex = next(turns)
        engine.step()

    for reference in references:
        params = SamplingParams(max_new_tokens=len(reference.tokens), ignore_eos=True)
        names.append(engine.add_request(reference.prompt, params))
        for _ in range(steps_between):
            step()
    while engine.has_unfinished():
        step()
    engine.check()
    assert engine.pool.num_used == 0, "pages are leaked"
    completions = [engine.completion(name) for name in names]
    assert all(completion is not None for completion in completions)
    return completions


def assert_served_alike(
    engine: Engine,
    references: Sequence[Reference],
    *,
    steps_between: int = 0,
    modes: Sequence[Mode] = ("off",),
    where: str = "",
) -> list[Completion]:
    """Serves the references' prompts and compares the tokens with theirs."""
    completions = serve(engine, references, steps_between=steps_between, modes=modes)
    for completion, reference in zip(completions, references, strict=True):
        assert_same_tokens(completion.token_ids, reference, where)
    return completions
