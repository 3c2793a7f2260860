"""Routing of mixtures of experts: rows sorted by expert and sorted back are token parallel; nearly the same is not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (defines grouped_mm_fallback)
from torch import fx, nn

from chunkc import compat
from chunkc.errors import UnsupportedModelError
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.prove_token_parallel import analyse

from .graphs import WIDTH, Captured, Cases, drawn, run_pass, tokens

EXPERTS, CHOSEN, WIDE = 4, 2, 16


def _prepare(at: SimpleNamespace) -> None:
    """The router: ``ids`` and ``gates`` [S * CHOSEN], rows ``hidden`` [S, WIDTH], and the sort by expert."""
    at.hidden = at.x.view(-1, WIDTH)
    gates, ids = at.router(at.hidden).softmax(-1).topk(CHOSEN, -1)
    at.gates, at.ids = gates.reshape(-1), ids.reshape(-1)
    at.count = at.hidden.shape[0] * CHOSEN
    at.sorted_ids, at.order = torch.sort(at.ids)
    at.other_order = torch.sort(at.router_two(at.hidden).topk(CHOSEN, -1).indices.reshape(-1)).indices
    at.rows = at.hidden[at.order // CHOSEN]


def _histogram(ids: torch.Tensor, bins: int = EXPERTS, low: int = 0, high: int = EXPERTS - 1) -> torch.Tensor:
    return torch.histc(ids.float(), bins=bins, min=low, max=high)


def _ends(ids: torch.Tensor, **options: int) -> torch.Tensor:
    return _histogram(ids, **options).cumsum(0, dtype=torch.int32)


def _experts(at: SimpleNamespace, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    grouped_mm = torch.ops.transformers.grouped_mm_fallback
    return grouped_mm(grouped_mm(rows, at.up, ends).relu(), at.down, ends)


def _inverse(at: SimpleNamespace, order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(at.count)
    return inverse


def _summed(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, CHOSEN, WIDTH).sum(1)[None]


def _usual(at: SimpleNamespace) -> torch.Tensor:
    """As transformers does it."""
    out = _experts(at, at.rows, _ends(at.sorted_ids)) * at.gates[at.order, None]
    return _summed(out[_inverse(at, at.order)])


def _added(at: SimpleNamespace) -> torch.Tensor:
    """Sorted rows are added to the tokens they came from."""
    out = _experts(at, at.rows, _ends(at.ids)) * at.gates[at.order, None]
    return torch.zeros_like(at.hidden).index_add(0, at.order // CHOSEN, out)[None]


def _one_matrix_a_row(at: SimpleNamespace) -> torch.Tensor:
    rows = at.hidden.repeat_interleave(CHOSEN, 0)
    out = torch.bmm(torch.bmm(rows[:, None], at.up[at.ids]).relu(), at.down[at.ids])[:, 0]
    return _summed(out * at.gates[:, None])


def _other_inverse(at: SimpleNamespace) -> torch.Tensor:
    out = _experts(at, at.rows, _ends(at.sorted_ids))
    return _summed(out[at.order.argsort()] * at.gates[:, None])


def _expanded_first(at: SimpleNamespace) -> torch.Tensor:
    rows = at.hidden.repeat_interleave(CHOSEN, 0)[at.order]
    return _summed(_experts(at, rows, _ends(at.ids[at.order]))[at.order.argsort()])


def _sorted_by_gate(at: SimpleNamespace) -> torch.Tensor:
    """Sorted by something else, nothing grouped, sorted back."""
    order = at.gates.argsort()
    return _summed(at.hidden[order // CHOSEN].tanh()[_inverse(at, order)])


ACCEPTED = {
    "usual": _usual,
    "added": _added,
    "one_matrix_a_row": _one_matrix_a_row,
    "argsort_twice": _other_inverse,
    "expanded_first": _expanded_first,
    "sorted_by_gate": _sorted_by_gate,
}


def _then_back(at: SimpleNamespace, rows: torch.Tensor) -> torch.Tensor:
    return _summed(rows[_inverse(at, at.order)])


def _capacity(at: SimpleNamespace) -> torch.Tensor:
    """An expert takes its first three tokens: who is dropped depends on who else is there."""
    place = (at.ids[:, None] == torch.arange(EXPERTS)).long().cumsum(0)
    return _summed(at.hidden.repeat_interleave(CHOSEN, 0) * (place < 4).all(-1)[:, None])


def _own_row_of_sorted(at: SimpleNamespace) -> torch.Tensor:
    rows = at.hidden[at.router(at.hidden).argmax(-1).argsort()]
    return rows[torch.arange(at.hidden.shape[0]), 0][None, :, None] + at.x


#: function, reason, operator
REFUSED = {
    "ends_of_another_sort": (
        lambda at: _then_back(
            at, _experts(at, at.rows, _ends(at.router_two(at.hidden).topk(2, -1).indices.reshape(-1)))
        ),
        "not sorted by what its groups count",
        "transformers.grouped_mm",
    ),
    "rows_of_another_sort": (
        lambda at: _then_back(at, _experts(at, at.hidden[at.other_order // CHOSEN], _ends(at.sorted_ids))),
        "not sorted by what its groups count",
        "transformers.grouped_mm",
    ),
    "rows_not_sorted": (
        lambda at: _summed(_experts(at, at.hidden.repeat_interleave(CHOSEN, 0), _ends(at.sorted_ids))),
        "not sorted by what its groups count",
        "transformers.grouped_mm",
    ),
    "counts_for_ends": (
        lambda at: _then_back(at, _experts(at, at.rows, _histogram(at.sorted_ids).to(torch.int32))),
        "not sorted by what its groups count",
        "transformers.grouped_mm",
    ),
    "counted_after_arithmetic": (
        lambda at: _then_back(at, _experts(at, at.rows, _ends((at.ids + 1) % EXPERTS))),
        "not sorted by what its groups count",
        "transformers.grouped_mm",
    ),
    "counted_as_booleans": (
        lambda at: _then_back(at, _experts(at, at.rows, _ends(at.ids.bool()))),
        "not sorted by what its groups count",
        "transformers.grouped_mm",
    ),
    "wide_bins": (
        lambda at: _then_back(at, _experts(at, at.rows, _ends(at.sorted_ids, high=2 * EXPERTS - 1))),
        "counts over tokens",
        "aten.histc",
    ),
    "bins_from_one": (
        lambda at: _then_back(at, _experts(at, at.rows, _ends(at.sorted_ids, low=1))),
        "counts over tokens",
        "aten.histc",
    ),
    "descending": (
        lambda at: _then_back(
            at, _experts(at, at.hidden[at.ids.argsort(descending=True) // CHOSEN], _ends(at.sorted_ids))
        ),
        "sorts tokens",
        "aten.argsort",
    ),
    "not_undone": (
        lambda at: _summed(_experts(at, at.rows, _ends(at.sorted_ids))),
        "not one row of logits",
        "aten.",
    ),
    "not_undone_but_added": (
        lambda at: at.x + _summed(_experts(at, at.rows, _ends(at.sorted_ids))),
        "in different order",
        "aten.add",
    ),
    "undone_by_another_sort": (
        lambda at: _summed(_experts(at, at.rows, _ends(at.sorted_ids))[_inverse(at, at.other_order)]),
        "undoes a sort that its rows are not in the order of",
        "aten.index",
    ),
    "sorted_again": (
        lambda at: _summed(_experts(at, at.rows, _ends(at.sorted_ids))[at.order]),
        "sorts rows that are not in the batch's order",
        "aten.index",
    ),
    "undone_before": (
        lambda at: _summed(at.hidden.repeat_interleave(CHOSEN, 0)[_inverse(at, at.order)]),
        "undoes a sort",
        "aten.index",
    ),
    "gates_not_sorted": (
        lambda at: _then_back(at, _experts(at, at.rows, _ends(at.sorted_ids)) * at.gates[:, None]),
        "in different order",
        "aten.mul",
    ),
    "wrong_number_a_token": (
        lambda at: _then_back(at, _experts(at, at.hidden[at.order // 3], _ends(at.sorted_ids))),
        "computes with the order",
        "aten.floor_divide",
    ),
    "order_for_token": (lambda at: _then_back(at, at.hidden[at.order % 2]), "depend on all tokens", "aten.remainder"),
    "order_as_number": (lambda at: at.x * at.order.view(-1, CHOSEN)[None, :, :1], "batch as a whole", "aten.reshape"),
    "added_in_another_order": (
        lambda at: torch.zeros_like(at.hidden).index_add(0, at.other_order // CHOSEN, at.rows)[None],
        "adds rows to places",
        "aten.index_add",
    ),
    "load_of_experts": (lambda at: at.x / _histogram(at.ids).max(), "batch as a whole", "aten.max"),
    "share_of_experts": (lambda at: at.x * (_histogram(at.ids) / 7)[0], "depend on all tokens", "aten.div"),
    "experts_choose_tokens": (
        lambda at: at.x * at.router(at.hidden).topk(1, 0).values[0, 0],
        "ranks along",
        "aten.topk",
    ),
    "capacity": (_capacity, "sums up along", "aten.cumsum"),
    "own_row_of_sorted": (_own_row_of_sorted, "rows of other tokens", "aten.index"),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {**ACCEPTED, **{name: case[0] for name, case in REFUSED.items()}}
    routers = {"router": nn.Linear(WIDTH, EXPERTS), "router_two": nn.Linear(WIDTH, EXPERTS)}
    weights = {
        "up": nn.Parameter(drawn(EXPERTS, WIDTH, WIDE)),
        "down": nn.Parameter(drawn(EXPERTS, WIDE, WIDTH)),
    }
    return Captured(Cases(functions, _prepare, **routers, **weights))


def _proven(captured: Captured, name: str) -> fx.GraphModule:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    with compat.one_graph_for_every_size():
        analyse(graph_module)
    return graph_module


@pytest.mark.parametrize("name", ACCEPTED)
def test_sorted_and_sorted_back_is_token_parallel(captured: Captured, name: str) -> None:
    graph_module = _proven(captured, name)

    def run(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return fx.Interpreter(graph_module).run(ids[None], torch.arange(len(ids))[None])[0]

    ids = tokens(23)
    whole = run(ids)
    torch.testing.assert_close(whole, captured.logits(name, ids))
    parts = torch.cat([run(ids[part]) for part in (slice(2), slice(2, 9), slice(9, 23))])
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_nearly_routing_is_refused(captured: Captured, name: str) -> None:
    _, reason, op = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        _proven(captured, name)
    assert caught.value.op.startswith(op)
    assert caught.value.module in (name, "")  # "": the router, which the cases share
