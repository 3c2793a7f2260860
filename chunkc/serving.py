"""What is handed to the engine, and how a lowered graph gets there: a runner with its cache, after the check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from chunkc import check, probe
from chunkc.config import EngineConfig
from chunkc.kernels import cpu_backend
from chunkc.prepared import Prepared
from chunkc.program import LoweredGraph
from chunkc.report import CompileReport
from chunkc.runtime.cache_size import choose_num_pages
from chunkc.runtime.runner import GraphRunner, bytes_per_page

#: at most, of the pages that the check runs on
_PROBE_PAGE_SIZE = 16


@dataclass(frozen=True)
class Started:
    """A model that can be served.

    Attributes:
        runner: computes its logits.
        report: how it came about.
        tokenizer: see ``chunkc.compile``, or None.
        generation_config: the model's defaults, an object or a mapping, or None.
    """

    runner: GraphRunner
    report: CompileReport
    tokenizer: Any
    generation_config: Any


def load_attention(prepared: Prepared) -> None:
    """Have the C++ body of attention serve the dtypes that a model's layers have, where it can be built."""
    for dtype in {layer.dtype for layer in prepared.layers}:
        cpu_backend.load(dtype)


def make_runner(graph: LoweredGraph, prepared: Prepared, config: EngineConfig) -> tuple[GraphRunner, str]:
    """The runner with its cache, and a line that says how large that is."""
    page_bytes = bytes_per_page(prepared.layers, config.page_size)
    num_pages = choose_num_pages(
        num_pages=config.num_pages,
        cache_memory=config.cache_memory,
        bytes_per_page=page_bytes,
        page_size=config.page_size,
        max_requests=config.max_requests,
        max_positions=prepared.longest,
    )
    tokens = num_pages * config.page_size
    mebibytes = num_pages * page_bytes / 2**20
    said = f"cache: {num_pages} pages of {config.page_size} tokens ({tokens} tokens, {mebibytes:.0f} MiB)"
    return _runner(graph, prepared, config.page_size, num_pages), said


def _runner(graph: LoweredGraph, prepared: Prepared, page_size: int, num_pages: int) -> GraphRunner:
    return GraphRunner(
        graph,
        prepared.layers,
        vocab_size=prepared.vocab_size,
        max_positions=prepared.longest,
        page_size=page_size,
        num_pages=num_pages,
    )


def verify(
    prepared: Prepared,
    graph: LoweredGraph,
    expected: check.Expected,
    page_size: int,
    find_module: Callable[[torch.Tensor, float], str | None],
) -> check.Verification:
    """The check runs on pages of its own: its room does not depend on the size of the cache, and its short prompts lie
    on several pages.

    Args:
        page_size: of the cache.
        expected, find_module: see ``check.verify``.

    Raises:
        VerificationError: the logits differ.
    """
    page_size = min(page_size, _PROBE_PAGE_SIZE)
    lengths = [len(prompt) for prompt in expected.prompts]
    runner = _runner(graph, prepared, page_size, probe.probe_pages(lengths, page_size))
    return check.verify(runner, expected, find_module)
