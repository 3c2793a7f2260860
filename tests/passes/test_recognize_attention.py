"""recognize_attention: every spelling of causal attention becomes one op that computes the same; the rest is refused.

Accepted cases go through all passes and are compared with the untouched module in packed, chunked batches, since that
is where a wrong mask, scale or grouping of heads shows.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chunkc.errors import PassError, UnsupportedModelError
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.recognize_attention import RecognizeAttention

from .graphs import INF, WIDTH, Captured, Cases, count_ops, drawn, refused, run_pass, run_passes, serve, tokens

HEADS, DIM = 4, 3
LOWEST = torch.finfo(torch.float32).min
#: short, so that no mask has to be evaluated far out
LONGEST = 64


def _prepare(at: SimpleNamespace) -> None:
    """q, k, v [1, 4, S, 3]; k2, v2 [1, 2, S, 3] for grouped heads; scores and masks."""
    size = at.ids.shape[1]

    def heads(linear: nn.Linear) -> torch.Tensor:
        return linear(at.x).view(1, size, -1, DIM).transpose(1, 2)

    at.q, at.k, at.v, at.k2, at.v2 = (heads(linear) for linear in (at.to_q, at.to_k, at.to_v, at.to_k2, at.to_v2))
    at.scores = at.q @ at.k.transpose(-1, -2)
    row = torch.arange(size)
    at.distance = row[:, None] - row[None, :]
    at.past = at.distance >= 0
    at.additive = torch.full((size, size), -INF).triu(1)


def _attend(at: SimpleNamespace, scores: torch.Tensor) -> torch.Tensor:
    return scores.softmax(-1) @ at.v


def _masked(at: SimpleNamespace, scores: torch.Tensor) -> torch.Tensor:
    return _attend(at, scores.masked_fill(~at.past, -INF))


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def _repeat(x: torch.Tensor, times: int, dim: int) -> torch.Tensor:
    """Heads [1, H, S, D] to [1, H * times, S, D]: each head ``times`` in a row (dim 2), or all of them in turn (1)."""
    _, heads, size, width = x.shape
    shape = (1, heads, times, size, width) if dim == 2 else (1, times, heads, size, width)
    return x.unsqueeze(dim).expand(shape).reshape(1, heads * times, size, width)


def _packed_heads(at: SimpleNamespace) -> torch.Tensor:
    """[H, S, D] with bmm, as older models write it."""
    scores = torch.bmm(at.q[0], at.k[0].transpose(1, 2)) * 0.37
    return torch.bmm(scores.masked_fill(~at.past, -INF).softmax(-1), at.v[0])[None]


def _biased_product(at: SimpleNamespace) -> torch.Tensor:
    """[H, S, D], the scores added to the bias by the product itself, and spread to [1, H, S, S] for the mask."""
    bias = (at.slopes * torch.arange(at.ids.shape[1])).to(at.x.dtype)
    scores = torch.baddbmm(bias, at.q[0], at.k[0].transpose(1, 2), beta=1.5, alpha=0.37)
    scores = scores.view(1, HEADS, at.ids.shape[1], -1) + torch.where(at.past, 0.0, LOWEST)
    return torch.bmm(scores.softmax(-1).view(HEADS, at.ids.shape[1], -1), at.v[0])[None]


def _sdpa(at: SimpleNamespace, bias: torch.Tensor, **options: object) -> torch.Tensor:
    return F.scaled_dot_product_attention(at.q, at.k, at.v, attn_mask=bias, **options)


def _by_interface(at: SimpleNamespace, bias: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
    mask = torch.where(at.past, bias, LOWEST)
    return torch.ops.chunkc.attention(at.q, at.k, at.v, mask, sinks, None, 0.37, False, 0, 0, 2.0).transpose(1, 2)


#: cases that add ALiBi to causal attention
ALIBI = {
    "alibi": lambda at: _attend(at, at.scores - at.distance * at.slopes + at.additive),
    "alibi_by_key": lambda at: _masked(at, at.scores * 0.3 + at.slopes * torch.arange(at.ids.shape[1])),
    "alibi_farther_is_more": lambda at: _attend(at, at.scores + at.distance * at.slopes + at.additive),
    "alibi_in_the_mask": lambda at: _attend(at, at.scores + torch.where(at.past, at.distance * -at.slopes, -INF)),
    "alibi_in_the_mask_other_way": lambda at: _attend(
        at, at.scores + (at.distance * -at.slopes).masked_fill(~at.past, LOWEST)
    ),
    "alibi_of_all_heads": lambda at: _attend(at, at.scores + (at.distance * -0.5 + at.additive)),
    "alibi_scaled_with_the_scores": lambda at: _masked(at, (at.scores - at.distance * at.slopes) * 0.4 / 1.3),
    "alibi_twice": lambda at: _masked(
        at, (at.scores - at.distance * at.slopes) * 0.4 + torch.arange(at.ids.shape[1]) * 0.1
    ),
    "alibi_baddbmm": _biased_product,
    "alibi_and_window": lambda at: _masked(
        at, (at.scores - at.distance * at.slopes).masked_fill(~(at.past & (at.distance < 5)), -INF)
    ),
    "alibi_behind_the_softcap": lambda at: _masked(at, torch.tanh(at.scores) * 2.0 - at.distance * at.slopes),
    "alibi_sdpa": lambda at: _sdpa(at, torch.where(at.past, at.distance * -at.slopes, -INF)[None], scale=0.4),
    "alibi_sdpa_grouped": lambda at: F.scaled_dot_product_attention(
        at.q, at.k2, at.v2, attn_mask=at.distance * -at.slopes + at.additive, enable_gqa=True
    ),
    "alibi_interface": lambda at: _by_interface(at, at.slopes * torch.arange(at.ids.shape[1])),
    "alibi_interface_sinks": lambda at: _by_interface(at, at.distance * -at.slopes, at.slopes.flatten()),
}

#: cases that compute causal attention, and (window, query heads, key heads) found
ACCEPTED = {
    # scale
    "scale_odd": (lambda at: _masked(at, at.scores * 0.37), (0, 4, 4)),
    "scale_none": (lambda at: _masked(at, at.scores), (0, 4, 4)),
    "scale_divided": (lambda at: _masked(at, at.scores / 1.7), (0, 4, 4)),
    "scale_buffer": (lambda at: _masked(at, at.scores / at.root), (0, 4, 4)),
    "scale_buffer_first": (lambda at: _masked(at, at.factor * at.scores), (0, 4, 4)),
    "scale_twice": (lambda at: _masked(at, at.scores * 0.5 / 1.3), (0, 4, 4)),
    "scale_of_query": (lambda at: _masked(at, (at.q * 0.37) @ (at.k * 1.9).transpose(-1, -2)), (0, 4, 4)),
    # softcap
    "softcap": (lambda at: _masked(at, torch.tanh(at.scores * 0.37 / 2.0) * 2.0), (0, 4, 4)),
    "softcap_other_factor": (lambda at: _masked(at, torch.tanh(at.scores / 2.0) * 3.0), (0, 4, 4)),
    "softcap_divided": (lambda at: _masked(at, torch.tanh(at.scores * 0.3) / 0.4), (0, 4, 4)),
    # mask
    "mask_where": (lambda at: _attend(at, torch.where(at.past, at.scores, -1e9)), (0, 4, 4)),
    "mask_where_other_way": (lambda at: _attend(at, torch.where(~at.past, LOWEST, at.scores)), (0, 4, 4)),
    "mask_where_tensor": (lambda at: _attend(at, torch.where(at.past, at.scores, at.lowest)), (0, 4, 4)),
    "mask_added_inf": (lambda at: _attend(at, at.scores + at.additive), (0, 4, 4)),
    "mask_added_first": (lambda at: _attend(at, at.additive + at.scores), (0, 4, 4)),
    "mask_added_1e9": (lambda at: _attend(at, at.scores + (~at.past) * -1e9), (0, 4, 4)),
    "mask_added_lowest": (lambda at: _attend(at, at.scores + torch.where(at.past, 0.0, LOWEST)), (0, 4, 4)),
    "mask_buffer": (lambda at: _attend(at, at.scores.masked_fill(at.square[at.distance] == 0, -INF)), (0, 4, 4)),
    "mask_window": (lambda at: _masked(at, at.scores.masked_fill(~(at.past & (at.distance < 5)), -INF)), (5, 4, 4)),
    "mask_twice": (lambda at: _attend(at, at.scores.masked_fill(~at.past, -1e9) + at.additive), (0, 4, 4)),
    # form
    "bmm": (_packed_heads, (0, 4, 4)),
    "bmm_into_memory_that_is_not_read": (
        lambda at: (
            torch.baddbmm(at.scores[0] * torch.nan, at.q[0], at.k[0].transpose(1, 2), beta=0, alpha=0.37)
            .masked_fill(~at.past, -INF)
            .softmax(-1)
            @ at.v[0]
        )[None],
        (0, 4, 4),
    ),
    "key_permuted": (lambda at: _masked(at, at.q @ at.k.transpose(1, 2).permute(0, 2, 3, 1)), (0, 4, 4)),
    "softmax_in_float": (
        lambda at: F.softmax(at.scores.masked_fill(~at.past, -INF), -1, dtype=torch.float32).to(at.x.dtype) @ at.v,
        (0, 4, 4),
    ),
    "dropout_off": (
        lambda at: F.dropout(at.scores.masked_fill(~at.past, -INF).softmax(-1), 0.1, training=False) @ at.v,
        (0, 4, 4),
    ),
    "roles_renamed": (lambda at: _masked(at, at.k @ at.q.transpose(-1, -2)), (0, 4, 4)),
    "narrow_values": (lambda at: _causal(at.q, at.k, at.v[..., :2]).repeat_interleave(2, -1)[..., :3], (0, 4, 4)),
    # SDPA
    "sdpa_causal": (lambda at: _causal(at.q, at.k, at.v), (0, 4, 4)),
    "sdpa_scale": (lambda at: _causal(at.q, at.k, at.v, scale=0.37), (0, 4, 4)),
    "sdpa_mask": (lambda at: F.scaled_dot_product_attention(at.q, at.k, at.v, attn_mask=at.past), (0, 4, 4)),
    "sdpa_added": (lambda at: F.scaled_dot_product_attention(at.q, at.k, at.v, attn_mask=at.additive), (0, 4, 4)),
    "sdpa_window": (
        lambda at: F.scaled_dot_product_attention(at.q, at.k, at.v, attn_mask=at.past & (at.distance < 3)),
        (3, 4, 4),
    ),
    # grouped heads: only the order "each head repeated in a row" is what the op does
    "groups_sdpa": (lambda at: _causal(at.q, at.k2, at.v2, enable_gqa=True), (0, 4, 2)),
    "groups_interleaved": (lambda at: _causal(at.q, *(x.repeat_interleave(2, 1) for x in (at.k2, at.v2))), (0, 4, 2)),
    "groups_expanded": (lambda at: _causal(at.q, _repeat(at.k2, 2, 2), _repeat(at.v2, 2, 2)), (0, 4, 2)),
    "groups_tiled": (lambda at: _causal(at.q, *(x.repeat(1, 2, 1, 1) for x in (at.k2, at.v2))), (0, 4, 4)),
    "groups_expanded_tiled": (lambda at: _causal(at.q, _repeat(at.k2, 2, 1), _repeat(at.v2, 2, 1)), (0, 4, 4)),
    "groups_mixed": (lambda at: _causal(at.q, _repeat(at.k2, 2, 2), _repeat(at.v2, 2, 1)), (0, 4, 4)),
    "groups_unlike": (lambda at: _causal(at.q, _repeat(at.k2, 2, 2), _repeat(at.v2[:, :1], 4, 2)), (0, 4, 4)),
    "groups_eager": (
        lambda at: (
            (at.q @ _repeat(at.k2, 2, 2).transpose(-1, -2)).masked_fill(~at.past, -INF).softmax(-1)
            @ _repeat(at.v2, 2, 2)
        ),
        (0, 4, 2),
    ),
    "one_key_head": (
        lambda at: (at.q @ at.k[:, :1].transpose(-1, -2)).masked_fill(~at.past, -INF).softmax(-1) @ at.v[:, :1],
        (0, 4, 1),
    ),
}


def _probabilities_used_twice(at: SimpleNamespace) -> torch.Tensor:
    probabilities = at.scores.masked_fill(~at.past, -INF).softmax(-1)
    return probabilities @ at.v + probabilities.mean(-1, keepdim=True)


def _two_products(at: SimpleNamespace) -> torch.Tensor:
    probabilities = at.scores.masked_fill(~at.past, -INF).softmax(-1)
    return probabilities @ at.v - probabilities @ at.v.square()


def _null_key(at: SimpleNamespace) -> torch.Tensor:
    mask = torch.cat([torch.ones_like(at.past[:, :1]), at.past], 1)
    k, v = (torch.cat([torch.zeros(1, HEADS, 1, DIM), x], 2) for x in (at.k, at.v))
    return F.scaled_dot_product_attention(at.q, k, v, attn_mask=mask)


def _uneven_groups(at: SimpleNamespace) -> torch.Tensor:
    return _causal(at.q, *(x.repeat_interleave(at.uneven, 1, output_size=4) for x in (at.k2, at.v2)))


#: cases that must be refused: function, the reason, the operator named
REFUSED = {
    "no_mask": (lambda at: _attend(at, at.scores), "without a causal mask", "aten.matmul"),
    "sdpa_no_mask": (
        lambda at: F.scaled_dot_product_attention(at.q, at.k, at.v),
        "without a causal mask",
        "chunkc.attention",
    ),
    "sdpa_dropout": (lambda at: _causal(at.q, at.k, at.v, dropout_p=0.1), "dropout", "aten.scaled_dot_product"),
    "mask_where_swapped": (lambda at: _attend(at, torch.where(at.past, -1e9, at.scores)), "neither causal", "aten.ge"),
    "mask_filled_swapped": (lambda at: _attend(at, at.scores.masked_fill(at.past, -1e9)), "neither causal", "aten.ge"),
    "mask_weak": (lambda at: _attend(at, at.scores.masked_fill(~at.past, -20.0)), "large negative", "aten.masked_fill"),
    "mask_weak_where": (lambda at: _attend(at, torch.where(at.past, at.scores, 0.0)), "large negative", "aten.where"),
    "mask_weak_added": (
        lambda at: _attend(at, at.scores + (~at.past) * -20.0),
        "without a causal mask",
        "aten.matmul",
    ),
    "mask_by_value": (
        lambda at: _attend(at, torch.where(at.past, at.scores, at.scores * 2.0)),
        "large negative",
        "aten.where",
    ),
    "mask_multiplied": (lambda at: _attend(at, at.scores * at.past), "positive number", "aten.mul"),
    "mask_boolean_added": (lambda at: _attend(at, at.scores + ~at.past), "boolean mask", "aten.add"),
    "mask_scaled_by_alpha": (
        lambda at: _attend(at, torch.add(at.additive, at.scores, alpha=2)),
        "added to attention",
        "aten.add",
    ),
    "mask_later_too": (lambda at: _masked(at, at.scores + at.additive.T), "see later tokens", "aten."),
    "mask_subtracted": (
        lambda at: _attend(at, at.scores - (~at.past) * 1e9),
        "without a causal mask",
        "aten.matmul",
    ),
    "alibi_alone": (
        lambda at: _attend(at, at.scores - at.distance * at.slopes),
        "without a causal mask",
        "aten.matmul",
    ),
    "alibi_sdpa_alone": (lambda at: _sdpa(at, at.distance * -at.slopes), "without a causal mask", "chunkc.attention"),
    "alibi_bent": (
        lambda at: _masked(at, at.scores - at.distance.clamp(max=40) * at.slopes),
        "is not ALiBi",
        "aten.mul",
    ),
    "alibi_bent_in_the_mask": (
        lambda at: _sdpa(at, torch.where(at.past, at.distance**2 * -at.slopes, -INF)[None]),
        "is not ALiBi",
        "aten.mul",
    ),
    "alibi_of_the_query": (
        lambda at: _masked(at, at.scores - at.distance * at.slopes * at.q.sum(-1, keepdim=True)),
        "which tokens",
        "aten.embedding",
    ),
    "alibi_before_the_softcap": (
        lambda at: _masked(at, torch.tanh(at.scores - at.distance * at.slopes) * 2.0),
        "after the mask",
        "aten.tanh",
    ),
    "alibi_within_the_softcap": (
        lambda at: _masked(at, (torch.tanh(at.scores) - at.distance * at.slopes) * 2.0),
        "scaled after the mask",
        "aten.mul",
    ),
    "alibi_and_a_weak_mask": (
        lambda at: _attend(at, at.scores - at.distance * at.slopes + (~at.past) * -10_010.0),
        "as large as the numbers",
        "aten.",
    ),
    "alibi_and_mask_scaled": (
        lambda at: _attend(at, (at.scores - at.distance * at.slopes + at.additive) * 0.5),
        "scaled after the mask",
        "aten.mul",
    ),
    "alibi_by_key_and_sinks": (
        lambda at: _by_interface(at, at.slopes * torch.arange(at.ids.shape[1]), at.slopes.flatten()),
        "sinks and a position bias",
        "chunkc.attention",
    ),
    "number_added": (lambda at: _masked(at, at.scores + 1.5), "number is added", "aten.add"),
    "scores_added": (
        lambda at: _masked(at, at.scores + at.q @ at.v.transpose(-1, -2)),
        "which tokens",
        "aten.embedding",
    ),
    "scale_after_mask": (
        lambda at: _attend(at, at.scores.masked_fill(~at.past, -1e4) * 1e-4),
        "scaled after the mask",
        "aten.mul",
    ),
    "scale_negative": (lambda at: _masked(at, at.scores * -0.5), "positive number", "aten.mul"),
    "scale_per_head": (lambda at: _masked(at, at.scores * at.slopes), "positive number", "aten.mul"),
    "scale_per_token": (
        lambda at: _masked(at, at.scores * at.x.sum(-1)[:, None, :, None]),
        "positive number",
        "aten.mul",
    ),
    "scale_of_length": (lambda at: _masked(at, at.scores / at.ids.shape[1]), "positive number", "aten.div"),
    "scale_rounded": (lambda at: _masked(at, torch.div(at.scores, 0.7, rounding_mode="floor")), "rounded", "aten.div"),
    "tanh_alone": (lambda at: _masked(at, torch.tanh(at.scores)), "softcap's factor", "aten.softmax"),
    "tanh_after_mask": (
        lambda at: _attend(at, torch.tanh(at.scores.masked_fill(~at.past, -1e9)) * 2.0),
        "after the mask",
        "aten.tanh",
    ),
    "tanh_twice": (lambda at: _masked(at, torch.tanh(torch.tanh(at.scores) * 3) * 2), "tanh twice", "aten.tanh"),
    "softcap_then_scale": (lambda at: _masked(at, torch.tanh(at.scores) * 3 * 0.2), "after their softcap", "aten.mul"),
    "cubed": (lambda at: _masked(at, at.scores**3), "not a product of query and key", "aten.softmax"),
    "softmax_over_queries": (
        lambda at: at.scores.masked_fill(~at.past, -1e9).softmax(-2) @ at.v,
        "does not run over the keys",
        "aten.softmax",
    ),
    "softmax_over_heads": (
        lambda at: at.scores.masked_fill(~at.past, -1e9).softmax(1) @ at.v,
        "does not run over the keys",
        "aten.softmax",
    ),
    "probabilities_used": (_probabilities_used_twice, "every token with every other", "aten.matmul"),
    "two_products": (_two_products, "every token with every other", "aten.matmul"),
    "null_key": (_null_key, "not equally long", "aten.scaled_dot_product"),
    "keys_shifted": (
        lambda at: _causal(at.q, torch.cat([at.k[:, :, :1], at.k[:, :, :-1]], 2), at.v),
        "takes a slice",
        "aten.slice",
    ),
    "groups_uneven": (_uneven_groups, "not constant", "aten.repeat_interleave"),
    "key_head_broadcast": (
        lambda at: _causal(at.q, at.k[:, :1], at.v),
        "4 query, 1 key and 4 value",
        "aten.scaled_dot",
    ),
    "value_head_broadcast": (
        lambda at: at.scores.masked_fill(~at.past, -INF).softmax(-1) @ at.v[:, :1],
        "4 query, 4 key and 1 value",
        "aten.matmul",
    ),
    "query_head_broadcast": (
        lambda at: (at.q[:, :1] @ at.k.transpose(-1, -2)).masked_fill(~at.past, -INF).softmax(-1) @ at.v,
        "1 query, 4 key and 4 value",
        "aten.matmul",
    ),
    "probabilities_broadcast": (
        lambda at: (at.q[:, :1] @ at.k[:, :1].transpose(-1, -2)).masked_fill(~at.past, -INF).softmax(-1) @ at.v,
        "1 query, 1 key and 4 value",
        "aten.matmul",
    ),
    "heads_as_batch": (
        lambda at: _causal(*(x.transpose(0, 1) for x in (at.q, at.k, at.v))).transpose(0, 1),
        "more than one sequence",
        "aten.scaled_dot",
    ),
    "five_dimensions": (
        lambda at: _causal(at.q.unflatten(1, (2, 2)), at.k2[:, :, None], at.v2[:, :, None]).flatten(1, 2),
        r"not all \[1, H, S, D\]",
        "aten.scaled_dot",
    ),
    "sdpa_over_heads": (
        lambda at: F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (at.q, at.k, at.v))).transpose(1, 2),
        "second to last dimension is not the sequence",
        "aten.scaled_dot",
    ),
}
#: softmaxes that are not attention over the sequence, beside one that is: left alone, or for a later pass to refuse
NOT_ATTENTION = {
    "over_heads": lambda at: (
        (at.q.transpose(1, 2) @ at.k.transpose(1, 2).transpose(-1, -2)).softmax(-1) @ at.v.transpose(1, 2)
    ),
    "over_features": lambda at: at.v.transpose(1, 2).softmax(-1),
}
MIXING = {
    "pooling": (lambda at: (at.x[..., :1].softmax(1) * at.x).sum(1, keepdim=True), "aten.softmax"),
    "linear_attention": (lambda at: at.x.softmax(-1) @ (at.x.softmax(1).transpose(1, 2) @ at.x), "aten.softmax"),
    "synthesizer": (lambda at: at.square[at.distance].float().softmax(-1) @ at.x, "aten."),
    "written_out": (lambda at: (lambda e: e / e.sum(-1, keepdim=True))(at.scores[0, 0].exp()) @ at.x, "aten.matmul"),
}


def _flat(function: object) -> object:
    return lambda at: function(at).transpose(1, 2).reshape(1, -1, WIDTH)


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {name: _flat(case[0]) for name, case in {**ACCEPTED, **REFUSED}.items()}
    functions |= {name: _flat(function) for name, function in ALIBI.items()}
    for name, function in NOT_ATTENTION.items():
        functions[name] = lambda at, f=function: _flat(ACCEPTED["sdpa_causal"][0])(at) + f(at).reshape(1, -1, WIDTH)
    for name, (function, _) in MIXING.items():
        functions[name] = lambda at, f=function: _flat(ACCEPTED["sdpa_causal"][0])(at) + f(at)
    linears = {f"to_{name}": nn.Linear(WIDTH, WIDTH) for name in "qkv"}
    grouped = {f"to_{name}2": nn.Linear(WIDTH, 2 * DIM) for name in "kv"}
    numbers = {"root": torch.tensor(1.7), "factor": torch.tensor([0.6]), "lowest": torch.tensor(-1e9)}
    square = torch.cat([torch.ones(LONGEST), torch.zeros(LONGEST)]).int()  # at distance d, also below 0
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]
    uneven = torch.tensor([3, 1])
    members = {**linears, **grouped, **numbers, "square": square, "slopes": slopes, "uneven": uneven}
    return Captured(Cases(functions, _prepare, **members))


@pytest.mark.parametrize("name", ACCEPTED)
def test_attention_is_served_as_the_module_computes_it(captured: Captured, name: str) -> None:
    (layer,) = serve(captured, name, max_positions=LONGEST).attention_layers
    assert (layer.shape.window, layer.shape.num_q_heads, layer.shape.num_kv_heads) == ACCEPTED[name][1]


@pytest.mark.parametrize("name", ALIBI)
def test_alibi_is_served_as_the_module_computes_it(captured: Captured, name: str) -> None:
    serve(captured, name, max_positions=LONGEST)


@pytest.mark.parametrize("name", ["alibi", "alibi_interface"])
def test_a_bias_in_attention_of_the_models_own_is_not_taken_from_another_path(captured: Captured, name: str) -> None:
    """Told of an attention that it does not know, a model may compute its bias otherwise than it does as it stands."""
    if name == "alibi_interface":
        run_passes(captured.graph(name), max_positions=LONGEST, route="interface")
        return
    with pytest.raises(UnsupportedModelError, match="does not go through transformers' interface"):
        run_passes(captured.graph(name), max_positions=LONGEST, route="interface")


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_causal_attention_is_refused(captured: Captured, name: str) -> None:
    _, reason, op = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        run_passes(captured.graph(name), max_positions=LONGEST)
    assert caught.value.op.startswith(op)
    assert caught.value.module in (name, "", "embed")  # "": computed where the cases share it


def test_refusal_names_the_module(captured: Captured) -> None:
    with refused("scaled after the mask", op="aten.mul.Tensor", module="scale_after_mask"):
        run_passes(captured.graph("scale_after_mask"), max_positions=LONGEST)


def _recognized(captured: Captured, name: str) -> tuple[object, object]:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    report = run_pass(RecognizeAttention(), graph_module, max_positions=LONGEST)
    return graph_module, report


@pytest.mark.parametrize("name", ["softcap", "mask_window", "bmm", "groups_interleaved", "sdpa_mask"])
def test_op_counts_and_numbers_of_the_pass_alone(captured: Captured, name: str) -> None:
    before = count_ops(captured.graph(name))
    assert before["aten.softmax"] + before["aten.scaled_dot_product_attention"] == 1
    graph_module, report = _recognized(captured, name)
    after = count_ops(graph_module)
    assert report.matches == after["chunkc.attention"] == 1
    gone = ("softmax", "scaled_dot_product_attention", "matmul", "bmm", "masked_fill", "tanh", "arange", "ge", "index")
    assert not any(after[f"aten.{op}"] for op in (*gone, "repeat_interleave", "full", "triu"))
    ids = tokens(23)
    torch.testing.assert_close(run_on_prompt(graph_module, ids), captured.logits(name, ids), atol=1e-5, rtol=1e-5)


def test_the_mask_is_told_in_the_report(captured: Captured) -> None:
    _, report = _recognized(captured, "mask_window")
    assert "causal, window 5" in " ".join(report.notes)


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_softmax_within_a_token_is_left_alone(captured: Captured, name: str) -> None:
    graph_module, report = _recognized(captured, name)
    assert report.matches == 1 and count_ops(graph_module)["aten.softmax"] == 1
    serve(captured, name, max_positions=LONGEST)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_is_not_attention_is_refused(captured: Captured, name: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        run_passes(captured.graph(name), max_positions=LONGEST)
    assert caught.value.op.startswith(MIXING[name][1])


def test_a_proof_that_ends_is_said(captured: Captured) -> None:
    """The mask of ``mask_added_inf`` is made by triu, so it is evaluated entry by entry."""
    graph_module = captured.graph("mask_added_inf")
    assert run_passes(graph_module, stop_after="recognize_attention", max_positions=10_000).proven_length == 4096
    graph_module = captured.graph("mask_where")
    assert run_passes(graph_module, stop_after="recognize_attention", max_positions=10_000).proven_length is None


def test_no_attention_at_all_is_an_error() -> None:
    captured = Captured(Cases({"plain": lambda at: at.x * 2}, weight=drawn(1)))
    with pytest.raises((PassError, UnsupportedModelError)):
        run_passes(captured.graph("plain"))
