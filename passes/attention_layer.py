"""An attention call of the rewritten graph, as data."""

from __future__ import annotations

from dataclasses import dataclass

from chunkc.dtypes import TorchDtype
from chunkc.kernels.tasks import AttentionShape


@dataclass(frozen=True)
class AttentionLayer:
    """One attention call of the rewritten graph.

    Attributes:
        index: its number; its pages are the inputs ``k_pages_{index}`` and ``v_pages_{index}``.
        shape: heads, head dims, window and chunk: what the task planner needs.
        plan: number of its task table; its inputs are ``tasks_{plan}`` and ``merges_{plan}``.
        dtype: of keys and values in the pages.
    """

    index: int
    shape: AttentionShape
    plan: int
    dtype: TorchDtype
