"""From logits to tokens.

The order is that of HuggingFace's generate: repetition penalty, then, when sampling, temperature, top-k,
top-p, min-p. Requests that are greedy and have no penalty (usually all of them) cost one argmax. The others
are handled together in two groups: rows with a top-k are first narrowed to the tokens that pass it, so that
what follows works on some fifty columns instead of the vocabulary; rows without one keep all columns.

What a row yields does not depend on the rows beside it: sums run in order and in float64, padding adds exact
zeros, and the random number comes from (seed, token index) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from chunkc.runtime.deferred_logits import DeferredLogits, Logits
from chunkc.runtime.philox import uniforms
from chunkc.runtime.request import Request

_HEAD = 1024  # likeliest tokens that are looked at first for a top-p


@dataclass(frozen=True, slots=True)
class Best:
    """The token of each row's largest logit (the lowest of equals), int64 ``[L]``, and that logit, float32 ``[L]``, NaN
    where a row holds one."""

    token_ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row.

    Attributes:
        token_ids: the tokens; meaningless in bad rows.
        bad_rows: rows whose logits hold NaN or +inf, or nothing but -inf.
    """

    token_ids: list[int]
    bad_rows: list[int]


class Sampler:
    """Picks the next token of each request. Holds a work buffer, hence not for two threads at once."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)

    def wanted(self, logits: Logits, requests: Sequence[Request]) -> torch.Tensor | Best:
        """What ``sample`` needs of a step's logits: the best tokens, where the requests are greedy and the model gives
        them by themselves, else all.

        Args:
            logits: L rows.
            requests: L requests; row ``i`` belongs to ``requests[i]``.

        Raises:
            ValueError: there is not one row per request.
        """
        if not isinstance(logits, DeferredLogits):
            return logits
        if logits.num_rows != len(requests):
            raise ValueError(f"{logits.num_rows} rows of logits for {len(requests)} requests")
        if any(request.sampling.needs_processing for request in requests):
            return logits.rows()
        token_ids, values = logits.best()
        return Best(token_ids.numpy(), values.numpy())

    def sample(self, logits: torch.Tensor | Best, requests: Sequence[Request]) -> Sampled:
        """Picks one token per row.

        Args:
            logits: ``[L, V]`` of any float dtype, on any device; not changed. Of greedy requests the best are enough.
            requests: L requests; row ``i`` belongs to ``requests[i]``.

        Raises:
            ValueError: the logits have not one row per request.
        """
        best = logits if isinstance(logits, Best) else self._argmax(logits, len(requests))
        token_ids, bad = best.token_ids, ~np.isfinite(best.values)
        chosen = [i for i, request in enumerate(requests) if request.sampling.needs_processing and not bad[i]]
        if chosen:
            assert isinstance(logits, torch.Tensor)
            rows = logits.detach()[chosen].to("cpu", torch.float32).numpy()
            token_ids[chosen] = pick(rows, [requests[i] for i in chosen])
        return Sampled(token_ids.tolist(), np.flatnonzero(bad).tolist())

    def _argmax(self, logits: torch.Tensor, num_rows: int) -> Best:
        """On the CPU NumPy's argmax does the same as torch's, ten times as fast."""
        if logits.dim() != 2 or logits.shape[0] != num_rows:
            raise ValueError(f"logits of shape {tuple(logits.shape)} for {num_rows} requests")
        if logits.device.type != "cpu":
            ids = logits.argmax(dim=-1)
            return Best(ids.cpu().numpy(), logits.gather(1, ids[:, None])[:, 0].float().cpu().numpy())
        if logits.dtype is not torch.float32:
            rows, columns = logits.shape
            if self._buffer.shape[1] != columns or self._buffer.shape[0] < rows:
                self._buffer = torch.empty(rows, columns)
            logits = self._buffer[:rows].copy_(logits)
        values = logits.detach().numpy()
        ids = values.argmax(axis=-1)
        return Best(ids, np.take_along_axis(values, ids[:, None], axis=-1)[:, 0])


def pick(scores: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Tokens of requests with a repetition penalty or with sampling.

    Args:
        scores: float32 ``[n, V]``, overwritten.
        requests: n requests, greedy ones among them too.

    Returns:
        int64 ``[n]``.
    """
    apply_repetition_penalty(scores, requests)
    drawn = np.array([request.sampling.do_sample for request in requests])
    narrow = np.array([request.sampling.top_k > 0 for request in requests])
    tokens = np.empty(len(requests), dtype=np.int64)
    for group, choose in ((~drawn, _best), (drawn & narrow, _draw), (drawn & ~narrow, _draw)):
        indices = np.flatnonzero(group)
        if indices.size == len(requests):
            return choose(scores, requests)
        if indices.size:
            tokens[indices] = choose(scores[indices], [requests[i] for i in indices])
    return tokens


def apply_repetition_penalty(scores: np.ndarray, requests: Sequence[Request]) -> None:
    """Divides the positive and multiplies the negative scores of tokens each request has seen. In place.

    Args:
        scores: float32 ``[n, V]``, contiguous.
        requests: n requests.
    """
    penalised = [i for i, request in enumerate(requests) if request.sampling.repetition_penalty != 1.0]
    if not penalised:
        return
    seen = [requests[i].tokens[: requests[i].num_tokens] for i in penalised]
    lengths = [len(tokens) for tokens in seen]
    penalties = np.array([requests[i].sampling.repetition_penalty for i in penalised], dtype=np.float32)
    where = np.concatenate(seen) + np.repeat(penalised, lengths) * scores.shape[1]
    penalty = np.repeat(penalties, lengths)
    flat = scores.reshape(-1)
    old = flat[where]
    # A token seen twice writes the same value twice: each is computed from the old score.
    flat[where] = np.where(old < 0, old * penalty, old / penalty)


def filtered(scores: np.ndarray, requests: Sequence[Request]) -> tuple[torch.Tensor, np.ndarray | None]:
    """The distribution each request draws from, after temperature, top-k, top-p and min-p.

    Args:
        scores: float32 ``[n, V]``, after the repetition penalty.
        requests: n requests, all with a top-k or all without.

    Returns:
        Weights, float64 ``[n, C]``, unnormalised, 0 for tokens that are filtered out; and the token each
        column stands for, int64 ``[n, C]``, increasing where the weight is not 0, or None if column ``t`` is
        token ``t``.
    """
    columns = None
    if requests[0].sampling.top_k > 0:
        scores, columns = _narrow(scores, [request.sampling.top_k for request in requests])
    temperature = _column([request.sampling.temperature for request in requests])
    shifted = torch.from_numpy(scores).double()
    # Shifted before the division: a tiny temperature then gives 1 and zeros in place of inf - inf.
    weights = shifted.sub_(shifted.amax(dim=-1, keepdim=True)).div_(temperature).exp_()
    top_p = torch.tensor([request.sampling.top_p for request in requests], dtype=torch.float64)
    rows = (top_p < 1.0).nonzero()[:, 0]
    if len(rows):
        outside = _outside_top_p(weights[rows], top_p[rows, None])
        weights[rows] = weights[rows].masked_fill_(outside, 0.0)
    min_p = [request.sampling.min_p for request in requests]
    if max(min_p) > 0.0:
        # The likeliest token's weight is exp(0) = 1 and no filter removes it.
        weights.masked_fill_(weights < _column(min_p), 0.0)
    return weights, columns


def _narrow(scores: np.ndarray, top_k: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Keeps the columns that pass each row's top-k, in their order, padded with -inf to the longest row.

    As with HuggingFace, tokens that tie with the k-th are kept. Doing this before the division by the
    temperature (there it is done after) keeps the same tokens: the division does not change their order.
    """
    ks = torch.tensor([min(k, scores.shape[1]) for k in top_k])
    best = torch.from_numpy(scores).topk(int(ks.max()), dim=-1).values
    threshold = best.gather(1, ks[:, None] - 1).numpy()
    rows, tokens = np.divmod(np.flatnonzero(scores >= threshold), scores.shape[1])
    counts = np.bincount(rows, minlength=len(ks))
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.zeros((len(ks), counts.max()), dtype=np.int64)
    columns[rows, place] = tokens
    kept = np.full(columns.shape, -np.inf, dtype=np.float32)
    kept[rows, place] = scores[rows, tokens]
    return kept, columns


def _outside_top_p(weights: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Marks the least likely tokens that together have no more than ``1 - top_p`` of each row's weight.

    Sorting a vocabulary is slow. Where the tokens behind the ``_HEAD`` likeliest have no more than that
    share, all of them are outside and only the head has to be in order.

    Args:
        weights: float64 ``[n, C]``.
        top_p: float64 ``[n, 1]``, below 1.
    """
    total = weights.cumsum(dim=-1)[:, -1:]
    share = (1.0 - top_p) * total
    outside = torch.ones(weights.shape, dtype=torch.bool)
    whole = torch.ones(len(weights), dtype=torch.bool)
    if weights.shape[1] > _HEAD:
        head, tokens = weights.topk(_HEAD, dim=-1)
        behind = total - head.cumsum(dim=-1)[:, -1:]
        whole = (behind > share)[:, 0]
        short = ~whole
        light = _lightest(head[short].flip(-1), behind[short], share[short])
        outside[short] = outside[short].scatter_(1, tokens[short].flip(-1), light)
    if whole.any():
        ordered, tokens = weights[whole].sort(dim=-1)
        light = _lightest(ordered, torch.zeros_like(total[whole]), share[whole])
        outside[whole] = outside[whole].scatter_(1, tokens, light)
    return outside


def _lightest(ordered: torch.Tensor, before: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Which of the increasing weights fit into a share, together with those before; never the last."""
    light = before + ordered.cumsum(dim=-1) <= share
    light[:, -1:] = False
    return light


def _best(scores: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    return scores.argmax(axis=-1)


def _draw(scores: np.ndarray, requests: Sequence[Request]) -> np.ndarray:
    """Inverse transform sampling: the first token at which the cumulated weight exceeds u * total."""
    weights, columns = filtered(scores, requests)
    seeds = np.array([request.sampling.seed for request in requests], dtype=np.uint64)
    indices = np.array([request.num_generated for request in requests], dtype=np.uint64)
    cumulative = weights.cumsum(dim=-1)
    target = torch.from_numpy(uniforms(seeds, indices))[:, None] * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, target, right=True)
    # u < 1, but u * total may round up to total: then the last token with weight.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    place = torch.minimum(place, last).numpy()
    return (place if columns is None else np.take_along_axis(columns, place, axis=1))[:, 0]


def _column(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]
