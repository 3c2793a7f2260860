"""What attention means, once more, apart from the code under test: dense, float64, no pages, no tasks."""

from __future__ import annotations

import math

import torch

from chunkc.kernels.cases import MixedCase


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    *,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of one request, head by head: q ``[n, Hq, Dk]``, k and v ``[kv_len, Hkv, D]``; query
    ``i`` stands at position ``first + i``. float64 ``[n, Hq, Dv]``."""
    group = q.shape[1] // k.shape[1]
    visible = torch.tensor(
        [
            [
                j <= i and (window == 0 or i - j < window) and (chunk == 0 or i // chunk == j // chunk)
                for j in range(k.shape[0])
            ]
            for i in range(first, first + q.shape[0])
        ],
        dtype=torch.bool,
    ).reshape(q.shape[0], k.shape[0])
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for h in range(q.shape[1]):
        scores = q[:, h].double() @ k[:, h // group].double().T * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if alibi_slopes is not None:
            distances = torch.tensor([[j - i for j in range(k.shape[0])] for i in range(first, first + q.shape[0])])
            scores = scores + float(alibi_slopes[h]) * distances.reshape(scores.shape).double()
        scores[~visible] = -math.inf
        if sinks is not None:
            scores = torch.cat([scores, sinks[h].double().expand(q.shape[0], 1)], 1)
        out[:, h] = torch.softmax(scores, 1)[:, : k.shape[0]] @ v[:, h // group].double()
    return out


def expected(case: MixedCase) -> torch.Tensor:
    """The result of a case in float64; rows of padding are 0."""
    out = torch.zeros(*case.q.shape[:2], case.shape.v_dim, dtype=torch.float64)
    offsets = case.metadata.q_offsets.tolist()
    for r, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        rows = slice(offsets[r], offsets[r + 1])
        out[rows] = attend(
            case.q[rows],
            keys,
            values,
            keys.shape[0] - (offsets[r + 1] - offsets[r]),
            scale=case.scale,
            window=case.shape.window,
            chunk=case.shape.chunk,
            softcap=case.softcap,
            sinks=case.sinks,
            alibi_slopes=case.alibi_slopes,
        )
    assert not math.isnan(float(out.sum()))
    return out
