"""The operators of chunkc: schemas, shape functions and the plain-torch bodies that define their meaning.

Importing this module registers them (once; Python's module cache makes it idempotent):

``chunkc::attention``
    the canonical attention of a captured graph: one call says all there is to say about one attention of the
    model, so passes need not look at the code around it.
``chunkc::mixed_attention``
    what it is lowered to: attention of a ragged batch of prefill chunks and decodes over paged keys and
    values. It appends this step's keys and values to the pages first (the two pages arguments are mutated),
    with cosines and sines it rotates queries and keys before that, then it attends along the task table of
    :mod:`chunkc.kernels.tasks`. Graphs spell out all arguments: Inductor's C++ wrapper knows no defaults.

The reference bodies serve every device for which no faster one is registered. The C++ body registers itself
for CPU when :func:`chunkc.kernels.cpu_backend.load` loads its first library, so there is one route to each body and
no Python between the compiled graph and C++. The Triton body is registered here for CUDA (and ROCm, which torch
dispatches under the same key) where torch is built for it and Triton is installed; Triton is imported at the first
use.

Compiled artifacts are cached by the operators' names and schemas: when an operator changes its meaning under the same
schema, or which arguments it writes to, give it a new name.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from chunkc.kernels import reference

ATTENTION_SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, Tensor? alibi_slopes, float scale, "
    "bool causal, int window, int chunk, float softcap) -> Tensor"
)
MIXED_ATTENTION_SCHEMA = (
    "mixed_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, "
    "Tensor q_offsets, Tensor kv_lens, Tensor page_table, Tensor slot_mapping, Tensor tasks, Tensor merges, "
    "Tensor? sinks, Tensor? alibi_slopes, float scale, int window, int chunk, float softcap, "
    "Tensor? cos=None, Tensor? sin=None) -> Tensor"
)


def _attention_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    chunk: int,
    softcap: float,
) -> torch.Tensor:
    batch, num_q_heads, seq, _ = q.shape
    return q.new_empty(batch, seq, num_q_heads, v.shape[3])


def _mixed_attention_shape(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_offsets: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tasks: torch.Tensor,
    merges: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2])


_library = torch.library.Library("chunkc", "DEF")
for _name, _schema, _body, _shape in (
    ("attention", ATTENTION_SCHEMA, reference.attention, _attention_shape),
    ("mixed_attention", MIXED_ATTENTION_SCHEMA, reference.mixed_attention, _mixed_attention_shape),
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"chunkc::{_name}", _shape, lib=_library)


def _triton_mixed_attention(*arguments: Any) -> torch.Tensor:
    from chunkc.kernels import triton_attention  # imports Triton

    return triton_attention.mixed_attention(*arguments)


if torch.backends.cuda.is_built() and importlib.util.find_spec("triton") is not None:
    _library.impl("mixed_attention", _triton_mixed_attention, "CUDA")

attention = torch.ops.chunkc.attention
mixed_attention = torch.ops.chunkc.mixed_attention
