"""What the operators mean, in plain torch. Slow, short, and the judge of every faster body.

All arithmetic is float32; only the result is rounded to the dtype of ``q``. The score of a query and a key is
``s = scale * q.k``, with ``softcap > 0`` then ``softcap * tanh(s / softcap)``. ALiBi adds to that, behind the softcap,
``slope * (j - i)`` for a query at position ``i`` and a key at ``j``: 0 for the query's own key. A sink is one more
logit per query head that takes part in the softmax and has no value; ALiBi does not touch it. A query that sees no key
at all gets zeros.
"""

from __future__ import annotations

import torch

from chunkc.kernels.tasks import Merge, Task


def attention(
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
    """Attention of a batch of whole sequences.

    Args:
        q: ``[B, Hq, S, Dk]``; query head ``h`` uses key/value head ``h // (Hq // Hkv)``.
        k: ``[B, Hkv, S, Dk]``.
        v: ``[B, Hkv, S, Dv]``.
        mask: bool (True = attend) or float (added to the scores), broadcastable to ``[B, Hq, S, S]``.
        sinks: ``[Hq]`` logits.
        alibi_slopes: float32 ``[Hq]``, of any sign.
        scale: factor of the scores.
        causal: query ``i`` sees keys ``j <= i`` only.
        window: 0, or key ``j`` is visible to query ``i`` only if ``i - j < window``.
        chunk: 0, or key ``j`` is visible to query ``i`` only if ``i // chunk == j // chunk``.
        softcap: 0, or the bound of the scores.

    Returns:
        ``[B, S, Hq, Dv]``, contiguous, dtype of ``q``.
    """
    num_q_heads, seq = q.shape[1:3]
    group = num_q_heads // k.shape[1]
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = _soft_cap(q.float() @ keys.transpose(-1, -2) * scale, softcap)
    position = torch.arange(seq, device=q.device)
    if alibi_slopes is not None:
        scores = scores + alibi_slopes.float()[:, None, None] * (position[None, :] - position[:, None])
    scores = scores.masked_fill(~_visible(position, position, causal, window, chunk), float("-inf"))
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask.float()
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        peak = torch.maximum(peak, sinks.float().view(1, -1, 1, 1))
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.float().view(1, -1, 1, 1) - peak)
    out = (weights @ values) / total.masked_fill(total == 0, 1.0)
    return out.to(q.dtype).transpose(1, 2).contiguous()


def mixed_attention(
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
    """Causal attention of a ragged batch over paged keys and values, which it first appends, rotated if need be.

    Args:
        q: ``[T, Hq, Dk]``, one row per new token of the step.
        k: ``[T, Hkv, Dk]``, keys of the same tokens.
        v: ``[T, Hkv, Dv]``, values of the same tokens.
        k_pages: ``[num_pages, Hkv, page_size, Dk]``, written at ``slot_mapping``.
        v_pages: ``[num_pages, Hkv, page_size, Dv]``, written at ``slot_mapping``.
        q_offsets, kv_lens, page_table, slot_mapping: the batch, see
            :class:`~chunkc.kernels.metadata.AttentionMetadata`.
        tasks, merges: the plan, see :mod:`chunkc.kernels.tasks`.
        sinks, alibi_slopes, scale, window, chunk, softcap: as for :func:`attention`, with ``i`` and ``j`` positions
            in the request.
        cos, sin: ``[T, Dr]`` in the dtype of ``q``, Dr even and at most Dk, or both None: what the first Dr elements
            of queries and keys are rotated by before anything else is done with them, see :func:`rotated`.

    Returns:
        ``[T, Hq, Dv]``, contiguous, dtype of ``q``; zero where no task writes.

    Raises:
        TypeError, ValueError: cos and sin do not fit q or each other. Nothing is written then.
    """
    if cos is not None or sin is not None:
        _check_rotary(q, cos, sin)
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    num_tokens, num_q_heads, _ = q.shape
    group = num_q_heads // k_pages.shape[1]
    page_size, v_dim = v_pages.shape[2], v_pages.shape[3]
    _append(k, v, k_pages, v_pages, slot_mapping)

    out = q.new_zeros(num_tokens, num_q_heads, v_dim)
    offsets, lengths = q_offsets.tolist(), kv_lens.tolist()
    partials: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def finish(item: Task | Merge, part: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
        """Bring the sink in, normalise and write the rows of ``item``."""
        acc, peak, total = part
        row = torch.arange(item.row_begin, item.row_end, device=q.device)
        token, head = offsets[item.request] + row // group, item.kv_head * group + row % group
        if sinks is not None:
            logit = sinks.float()[head]
            acc, peak, total = _combine([(acc, peak, total), (torch.zeros_like(acc), logit, torch.ones_like(total))])
        out[token, head] = (acc / total.masked_fill(total == 0, 1.0)[:, None]).to(q.dtype)

    for task in map(Task._make, tasks.tolist()):
        row = torch.arange(task.row_begin, task.row_end, device=q.device)
        key = torch.arange(task.kv_begin, task.kv_end, device=q.device)
        first_token = offsets[task.request]
        q_len = offsets[task.request + 1] - first_token
        query = q[first_token + row // group, task.kv_head * group + row % group].float()
        page = page_table[task.request].index_select(0, key // page_size).long()
        keys = k_pages[page, task.kv_head, key % page_size].float()
        values = v_pages[page, task.kv_head, key % page_size].float()

        position = lengths[task.request] - q_len + row // group
        scores = _soft_cap(query @ keys.T * scale, softcap)
        if alibi_slopes is not None:
            slope = alibi_slopes.float()[task.kv_head * group + row % group]
            scores = scores + slope[:, None] * (key[None, :] - position[:, None])
        scores = scores.masked_fill(~_visible(position, key, True, window, chunk), float("-inf"))
        peak = scores.amax(-1)
        weights = torch.exp(scores - peak.masked_fill(peak == float("-inf"), 0.0)[:, None])
        part = (weights @ values, peak, weights.sum(-1))
        if task.partial < 0:
            finish(task, part)
        else:
            partials[task.partial] = part

    for merge in map(Merge._make, merges.tolist()):
        rows = merge.row_end - merge.row_begin
        finish(merge, _combine([partials[merge.partial + i * rows] for i in range(merge.num_splits)]))
    return out


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x ``[T, H, D]`` with the first Dr elements of each head turned by cos and sin ``[T, Dr]``.

    ``x * cos + (-second half, first half) * sin`` in float32, rounded once to the dtype of x.
    """
    size = cos.shape[1]
    turned = x[..., :size].float()
    first, second = turned.chunk(2, -1)
    turned = turned * cos.float()[:, None] + torch.cat([-second, first], -1) * sin.float()[:, None]
    return torch.cat([turned.to(x.dtype), x[..., size:]], -1)


def _check_rotary(q: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> None:
    if cos is None or sin is None:
        raise ValueError("mixed_attention: cos and sin go together")
    if not cos.dtype == sin.dtype == q.dtype:
        raise TypeError("mixed_attention: cos and sin must have the dtype of q")
    sizes = tuple(cos.shape)
    if sizes != tuple(sin.shape) or len(sizes) != 2 or sizes[0] != q.shape[0]:
        raise ValueError(f"mixed_attention: cos {sizes} and sin {tuple(sin.shape)} do not fit q {tuple(q.shape)}")
    if sizes[1] % 2 or not 0 < sizes[1] <= q.shape[2]:
        raise ValueError(f"mixed_attention: cos {sizes} does not fit q {tuple(q.shape)}: its halves")


def _append(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    page_size = k_pages.shape[2]
    token = torch.nonzero(slot_mapping >= 0).flatten()
    slot = slot_mapping[token]
    k_pages[slot // page_size, :, slot % page_size] = k[token].to(k_pages.dtype)
    v_pages[slot // page_size, :, slot % page_size] = v[token].to(v_pages.dtype)


def _visible(query: torch.Tensor, key: torch.Tensor, causal: bool, window: int, chunk: int) -> torch.Tensor:
    """bool ``[len(query), len(key)]``: whether the query at one position may see the key at another."""
    query, key = query[:, None], key[None, :]
    visible = torch.ones(query.shape[0], key.shape[1], dtype=torch.bool, device=query.device)
    if causal:
        visible = visible & (key <= query)
    if window > 0:
        visible = visible & (query - key < window)
    if chunk > 0:
        visible = visible & (query // chunk == key // chunk)
    return visible


def _soft_cap(scores: torch.Tensor, softcap: float) -> torch.Tensor:
    return softcap * torch.tanh(scores / softcap) if softcap > 0 else scores


def _combine(
    parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge softmaxes over disjoint keys, each given as (acc ``[rows, Dv]``, peak ``[rows]``, total
    ``[rows]``).

    ``acc`` and ``total`` are relative to ``exp(peak)``; a part that saw no key has peak -inf and weighs
    nothing.
    """
    peak = torch.stack([p[1] for p in parts]).amax(0)
    base = peak.masked_fill(peak == float("-inf"), 0.0)
    weights = [torch.exp(p[1] - base) for p in parts]
    acc = sum((w[:, None] * p[0] for w, p in zip(weights, parts, strict=True)), torch.zeros_like(parts[0][0]))
    total = sum((w * p[2] for w, p in zip(weights, parts, strict=True)), torch.zeros_like(parts[0][2]))
    return acc, peak, total
