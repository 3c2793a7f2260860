"""position_bias: ALiBi's slopes are read from a bias; what only looks like it is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from chunkc.errors import UnsupportedModelError
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.fx_tools import output_node
from chunkc.passes.position_bias import PositionBias, prove_alibi

from .graphs import Captured, Cases, run_pass

LONGEST = 4096
#: as models have them: powers of two, and of its root
SLOPES = torch.tensor([0.5, 0.25, 0.70710677, 0.0441941731])
NEGATIVE = -SLOPES


def _indices(at: SimpleNamespace) -> None:
    at.size = at.ids.shape[1]
    at.row = torch.arange(at.size)
    at.i, at.j = at.row[:, None], at.row[None, :]
    at.distance = at.j - at.i
    at.alibi = at.slopes * at.distance
    at.by_key = at.slopes * at.row


def _of_a_mask_of_ones(at: SimpleNamespace) -> torch.Tensor:
    """Keys counted by running over a mask that hides none."""
    mask = torch.ones_like(at.ids)
    return at.slopes * ((mask.cumsum(-1) - 1) * mask)[:, None, :]


def _by_position(at: SimpleNamespace) -> torch.Tensor:
    return at.slopes * (at.positions[0][None, :] - at.positions[0][:, None])


#: biases, their slopes, and whether they are 0 at each query's own key
PROVEN = {
    "by_distance": (lambda at: at.alibi, SLOPES, True),
    "by_distance_both_ways": (lambda at: at.slopes * -at.distance.abs(), SLOPES, True),
    "of_what_is_seen": (lambda at: at.slopes * at.distance.clamp(max=0), SLOPES, True),
    "by_key": (lambda at: at.by_key, SLOPES, False),
    "by_key_in_four_dimensions": (lambda at: at.by_key[None], SLOPES, False),
    "by_key_from_the_end_of_a_table": (lambda at: at.slopes * (at.row - 999), SLOPES, False),
    "by_position": (_by_position, SLOPES, True),
    "of_a_mask_of_ones": (_of_a_mask_of_ones, SLOPES, False),
    "with_a_number_a_query": (lambda at: at.alibi + at.i * 3.5, SLOPES, False),
    "farther_is_more": (lambda at: -at.alibi, NEGATIVE, True),
    "divided": (lambda at: at.alibi / 3, SLOPES / 3, True),
    "of_one_head": (lambda at: at.distance * 0.1, torch.tensor([0.1]), True),
    "of_integers": (lambda at: at.distance * 2, torch.tensor([2.0]), True),
    "same_for_all_keys": (lambda at: at.i * 0.5, torch.tensor([0.0]), False),
    "of_doubles": (lambda at: at.slopes.double() * at.distance, SLOPES, True),
}
#: where sums and quotients are rounded, and so the slopes that can be read
RTOL = {"divided": 3e-7, "with_a_number_a_query": 2e-6}
_BENT = "not linear in the distance"
#: biases that are not ALiBi, and why
REFUSED = {
    "root": (lambda at: at.slopes * -(-at.distance).clamp(0).float().sqrt(), _BENT),
    "logarithm": (lambda at: at.slopes * -(1 - at.distance.clamp(max=0)).float().log(), _BENT),
    "square": (lambda at: at.slopes * -(at.distance**2), _BENT),
    "square_by_key": (lambda at: at.slopes * at.row**2, _BENT),
    "hardly_bent": (lambda at: at.alibi * (1 + at.distance * 1e-9), _BENT),
    "hardly_bent_by_key": (lambda at: at.by_key * (1 + at.row * 1e-9), _BENT),
    "buckets": (lambda at: at.table[(-at.distance).clamp(0, 31)] * 1.0, _BENT),
    "flat_from_far_on": (lambda at: at.slopes * at.distance.clamp(min=-2500), _BENT),
    "flat_by_key": (lambda at: at.slopes * at.row.clamp(max=2500), _BENT),
    "steeper_from_far_on": (lambda at: at.alibi - (-at.distance - 2500).clamp(0), _BENT),
    "steeper_for_later_queries": (lambda at: at.alibi * (1 + at.i / 1000), _BENT),
    "one_key_stands_out": (lambda at: at.by_key + (at.row == 300) * 0.5, _BENT),
    "one_key_stands_out_far_on": (lambda at: at.alibi + (at.j == 3001) * 0.5, _BENT),
    "one_query_stands_out_far_on": (lambda at: at.alibi * (1 + (at.i == 3001)), _BENT),
    "one_distance_stands_out": (lambda at: at.alibi - (at.distance == -3001) * 0.5, _BENT),
    "own_key_stands_out": (lambda at: at.alibi + (at.distance == 0) * 0.5, _BENT),
    "in_steps": (lambda at: at.slopes * (at.row // 2), _BENT),
    "rounded_to_bfloat16": (lambda at: (at.slopes.bfloat16() * at.row).float(), _BENT),
    "in_bfloat16": (lambda at: (at.slopes * at.row).bfloat16(), _BENT),
    "trained": (lambda at: at.trained[:, None, None] * at.distance, "trained parameters"),
    "of_the_tokens": (lambda at: at.slopes * at.x[0, :, 0], "depends on which tokens"),
    "of_the_query": (lambda at: at.alibi * at.x[0, :, :1], "depends on which tokens"),
    "of_the_length": (lambda at: at.alibi / at.size, "depends on how long"),
    "of_sequences": (lambda at: torch.stack([at.alibi, at.alibi]), "differs between sequences"),
    "infinite": (lambda at: at.alibi * 1e38, "not finite"),
}
#: in bfloat16 or float16: what the model multiplies with, and how close the slopes come to it
ROUNDED = {
    "half_by_key": (lambda at: (at.slopes * at.row).bfloat16(), SLOPES, 3e-4),
    "half_by_distance": (lambda at: (at.slopes * at.distance).bfloat16(), SLOPES, 3e-4),
    "half_slopes": (lambda at: at.slopes.bfloat16() * at.row / 8, SLOPES.bfloat16() / 8.0, 1e-3),
    "half_divided": (lambda at: (at.slopes * at.row).bfloat16() / 7, SLOPES / 7, 1e-3),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    cases = {name: case[0] for name, case in {**PROVEN, **REFUSED, **ROUNDED}.items()}
    cases["small_half"] = lambda at: (at.slopes * at.row).half()
    cases["table"] = lambda at: at.rows[at.row]
    cases["short_table"] = lambda at: at.rows[:100][at.row]
    cases["not_sampled"] = lambda at: at.slopes * -torch.ones(at.size, at.size).tril(-1).cumsum(0)
    buckets = torch.cat([torch.arange(16.0), 16 + torch.arange(16.0).log1p()])
    members = {"slopes": SLOPES[:, None, None], "table": -buckets, "rows": torch.arange(600) * 0.5}
    return Captured(Cases(cases, _indices, **members, trained=nn.Parameter(SLOPES.clone())))


def _prove(captured: Captured, name: str, **options: object) -> PositionBias:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    return prove_alibi(graph_module, output_node(graph_module.graph), **{"longest": LONGEST, **options})


@pytest.mark.parametrize("name", PROVEN)
def test_slopes_are_found(captured: Captured, name: str) -> None:
    _, slopes, is_zero_at_own = PROVEN[name]
    found = _prove(captured, name)
    torch.testing.assert_close(found.slopes, slopes, rtol=RTOL.get(name, 0), atol=0)
    assert found.slopes.dtype == torch.float32
    assert (found.is_zero_at_own, found.proven_length) == (is_zero_at_own, None)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_alibi_is_refused(captured: Captured, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][1]) as caught:
        _prove(captured, name)
    assert caught.value.op and caught.value.module in ("", "embed", name)  # "": what the cases share


@pytest.mark.parametrize("name", ROUNDED)
def test_a_model_in_bfloat16_may_round_its_bias(captured: Captured, name: str) -> None:
    _, slopes, near = ROUNDED[name]
    found = _prove(captured, name, dtype=torch.bfloat16)
    torch.testing.assert_close(found.slopes, slopes, rtol=near, atol=0, check_dtype=False)


@pytest.mark.parametrize("name", ["root", "logarithm", "square", "buckets", "flat_from_far_on", "in_steps", "trained"])
def test_rounding_excuses_no_other_bias(captured: Captured, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][1]):
        _prove(captured, name, dtype=torch.bfloat16)


def test_a_bias_is_proven_as_far_as_it_goes(captured: Captured) -> None:
    assert _prove(captured, "table").proven_length == 600
    assert _prove(captured, "table", longest=500).proven_length is None
    assert _prove(captured, "small_half", dtype=torch.float16, longest=131072).proven_length == 65536  # then infinite
    assert 200 < _prove(captured, "not_sampled").proven_length < 2048


def test_a_bias_must_stay_smaller_than_what_masks_forbid_by(captured: Captured) -> None:
    assert _prove(captured, "by_key", largest=1e9).proven_length is None
    assert _prove(captured, "by_key", largest=1e3).proven_length == 1024
    with pytest.raises(UnsupportedModelError, match="as large as the numbers by which the mask forbids"):
        _prove(captured, "by_key", largest=100.0)


def test_tables_that_end(captured: Captured) -> None:
    for name in ("table", "short_table"):
        assert _prove(captured, name, longest=None).proven_length == (600 if name == "table" else 100)


def test_short_models(captured: Captured) -> None:
    for longest in (1, 2, 3, 37, 100):
        found = _prove(captured, "by_distance", longest=longest)
        assert found.proven_length is None and (longest == 1 or torch.equal(found.slopes, SLOPES))
