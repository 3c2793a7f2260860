"""Makes the tiny HuggingFace models of tests/models importable, and keeps the tests to one thread."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are tiny: threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
