"""mask_meaning: what a mask means is read from its values, near and far, and everything else is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from chunkc.errors import UnsupportedModelError
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.fx_tools import output_node
from chunkc.passes.mask_meaning import FULL_LIMIT, MaskMeaning, prove_mask

from .graphs import INF, VOCAB, Captured, Cases, refused, run_pass

LONGEST = 32768


def _indices(at: SimpleNamespace) -> None:
    at.size = at.ids.shape[1]
    at.row = torch.arange(at.size)
    at.i, at.j = at.row[:, None], at.row[None, :]
    at.past = at.j <= at.i
    at.distance = at.i - at.j
    at.full = torch.ones(at.size, at.size)


def _by_position(at: SimpleNamespace) -> torch.Tensor:
    return at.positions[0][None, :] <= at.positions[0][:, None]


def _packed(at: SimpleNamespace) -> torch.Tensor:
    """How transformers tells packed sequences apart: running over the positions, then looking them up."""
    sequence = (at.positions.diff(dim=-1, prepend=at.positions[:, :1] - 1) != 1).cumsum(-1)[0]
    return at.past & (sequence[at.i] == sequence[at.j]) & (at.positions[0][at.i] - at.positions[0][at.j] < 4100)


#: boolean masks (True = attend) and what they mean
PROVEN = {
    "causal": (lambda at: at.past, MaskMeaning()),
    "strictly_less": (lambda at: ~(at.j > at.i), MaskMeaning()),
    "window": (lambda at: at.past & (at.distance < 5), MaskMeaning(window=5)),
    "window_inclusive": (lambda at: at.past & (at.distance <= 5), MaskMeaning(window=6)),
    "window_one": (lambda at: at.distance == 0, MaskMeaning(window=1)),
    "window_far": (lambda at: at.past & (at.distance < 4097), MaskMeaning(window=4097)),
    "window_odd": (lambda at: at.past & (at.distance < 20011), MaskMeaning(window=20011)),
    "chunk": (lambda at: at.past & (at.i // 5 == at.j // 5), MaskMeaning(chunk=5)),
    "chunk_far": (lambda at: at.past & (at.i // 8192 == at.j // 8192), MaskMeaning(chunk=8192)),
    "chunk_odd": (lambda at: at.past & (at.i // 20011 == at.j // 20011), MaskMeaning(chunk=20011)),
    "by_position": (_by_position, MaskMeaning()),
    "packed": (_packed, MaskMeaning(window=4100)),
    "of_a_shape": (lambda at: at.past & torch.ones_like(at.ids, dtype=torch.bool), MaskMeaning()),
    "table_of_distances": (lambda at: at.past & at.table[at.distance.clamp(0, 63)], MaskMeaning(window=40)),
    "four_dimensions": (lambda at: at.past.expand(1, 3, at.size, at.size), MaskMeaning()),
    "additive": (lambda at: torch.where(at.past, 0.0, -INF), MaskMeaning()),
    "additive_lowest": (lambda at: torch.where(at.past, 0.0, torch.finfo(torch.float32).min), MaskMeaning()),
}
#: these run over indices (tril), so they are proven as far as they are evaluated
PROVEN_SO_FAR = {
    "tril": (lambda at: at.full.tril().bool(), MaskMeaning(proven_length=FULL_LIMIT)),
    "triu": (lambda at: torch.full((at.size, at.size), -1e9).triu(1), MaskMeaning(proven_length=FULL_LIMIT)),
    "one_minus": (lambda at: (1.0 - at.full.tril()) * -10000.0, MaskMeaning(proven_length=FULL_LIMIT)),
    "window_late": (lambda at: at.full.tril().triu(-200).bool(), MaskMeaning(window=201, proven_length=FULL_LIMIT)),
    "table": (lambda at: at.square[at.i, at.j], MaskMeaning(proven_length=600)),
}
_BIAS = "adds a bias"
_OTHER = "neither causal, causal with a sliding window, nor causal in chunks"
#: masks that must not be taken for causal: function, reason
REFUSED = {
    "bidirectional": (lambda at: at.full.bool(), "see later tokens"),
    "prefix": (lambda at: at.past | (at.j < 4), "see later tokens"),
    "anticausal": (lambda at: at.j >= at.i, "see later tokens"),
    "one_ahead": (lambda at: at.j <= at.i + 1, "see later tokens"),
    "causal_but_far": (lambda at: at.past | (at.distance < -20000), "see later tokens"),
    "strict": (lambda at: at.j < at.i, _OTHER),
    "dilated": (lambda at: at.past & (at.distance % 2 == 0), _OTHER),
    "dilated_far": (lambda at: at.past & ((at.distance < 1000) | (at.distance % 2 == 0)), _OTHER),
    "sink_tokens": (lambda at: at.past & ((at.distance < 5) | (at.j < 2)), _OTHER),
    "sink_tokens_far": (lambda at: at.past & ((at.distance < 9000) | (at.j < 2)), _OTHER),
    "window_then_all": (lambda at: at.past & ((at.distance < 300) | (at.i > 9000)), _OTHER),
    "window_in_chunks": (lambda at: at.past & (at.distance < 3) & (at.i // 7 == at.j // 7), _OTHER),
    "nothing": (lambda at: at.past & (at.j < 0), _OTHER),
    "heads_differ": (lambda at: torch.stack([at.past, at.past & (at.distance < 3)]), "differs between heads"),
    "alibi": (lambda at: at.distance * at.slopes + torch.where(at.past, 0.0, -INF), "differs between heads"),
    "bias": (lambda at: at.distance * -0.5 + torch.where(at.past, 0.0, -INF), _BIAS),
    "weak": (lambda at: torch.where(at.past, 0.0, -100.0), _BIAS),
    "nan": (lambda at: at.full.triu(1) * -INF, _BIAS),
    "of_the_tokens": (lambda at: at.past & (at.ids[0] != 3), "depends on which tokens"),
    "of_embeddings": (lambda at: at.past & (at.x[0, :, 0] > 0), "depends on which tokens"),
    "of_the_length": (lambda at: at.past & (at.j >= at.size - 1000), "depends on how long"),
    "of_the_length_as_tensor": (
        lambda at: at.past | (at.j < at.full.new_full((), at.size) - 4000),
        "depends on how long",
    ),
    "later": (lambda at: at.j > at.i, _OTHER),
    "one_dimension": (lambda at: at.row < 5, "fewer than two dimensions"),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {name: case[0] for name, case in {**PROVEN, **PROVEN_SO_FAR, **REFUSED}.items()}
    table = torch.arange(64) < 40
    square = torch.ones(600, 600, dtype=torch.bool).tril()
    return Captured(
        Cases(functions, _indices, table=table, square=square, slopes=torch.tensor([0.5, 0.25])[:, None, None])
    )


def _prove(captured: Captured, name: str, **options: object) -> MaskMeaning:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    return prove_mask(graph_module, output_node(graph_module.graph), **{"longest": LONGEST, **options})


@pytest.mark.parametrize("name", PROVEN)
def test_meaning_is_found_at_any_distance(captured: Captured, name: str) -> None:
    """No size is named by a configuration here: all are found by looking."""
    if name == "by_position":
        assert _prove(captured, name, longest=None) == MaskMeaning()  # 131072 positions, not their square
    assert _prove(captured, name) == PROVEN[name][1]


@pytest.mark.parametrize("name", PROVEN_SO_FAR)
def test_meaning_counts_as_proven_only_as_far_as_it_was_evaluated(captured: Captured, name: str) -> None:
    assert _prove(captured, name) == PROVEN_SO_FAR[name][1]


def test_the_longest_sequence_bounds_what_must_be_proven(captured: Captured) -> None:
    assert _prove(captured, "tril", longest=300) == MaskMeaning()  # proven for all there is
    assert _prove(captured, "table", longest=600) == MaskMeaning()
    assert _prove(captured, "window_late", longest=200) == MaskMeaning()  # no sequence reaches past the window
    assert _prove(captured, "window_late", longest=202) == MaskMeaning(window=201)
    assert _prove(captured, "chunk_odd", longest=20011) == MaskMeaning()
    assert _prove(captured, "chunk_odd", longest=20012, hints=[20011]).allowed(torch.tensor([0, 20011])).tolist() == [
        [True, False],
        [False, True],
    ]
    assert _prove(captured, "causal", longest=1) == MaskMeaning()


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused(captured: Captured, name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name][1]) as caught:
        _prove(captured, name)
    assert caught.value.op.startswith("aten.")
    assert caught.value.module in ("", "embed", name)  # "": what the cases share


def test_refusal_names_op_and_module(captured: Captured) -> None:
    with refused("neither causal", op="aten.__and__", module="dilated"):
        _prove(captured, "dilated")
    with refused("which tokens", op="aten.select", module="of_the_tokens"):
        _prove(captured, "of_the_tokens")


def test_true_may_mean_masked(captured: Captured) -> None:
    """The complement of "sees later tokens only" is causal; what is causal or sees its own token is not."""
    graph_module = captured.graph("anticausal")
    with pytest.raises(UnsupportedModelError):
        prove_mask(graph_module, output_node(graph_module.graph), longest=64, true_means_masked=True)
    graph_module = captured.graph("causal")
    with pytest.raises(UnsupportedModelError, match="neither causal"):
        prove_mask(graph_module, output_node(graph_module.graph), longest=64, true_means_masked=True)
    graph_module = captured.graph("later")
    mask = output_node(graph_module.graph)
    assert prove_mask(graph_module, mask, longest=64, true_means_masked=True) == MaskMeaning()


@pytest.mark.parametrize("meaning", [MaskMeaning(), MaskMeaning(window=3), MaskMeaning(chunk=4), MaskMeaning(2, 4)])
def test_allowed_says_who_sees_whom(meaning: MaskMeaning) -> None:
    positions = torch.tensor([0, 1, 3, 4, 9])
    for row, i in enumerate(positions.tolist()):
        for column, j in enumerate(positions.tolist()):
            sees = j <= i
            sees &= not meaning.window or i - j < meaning.window
            sees &= not meaning.chunk or i // meaning.chunk == j // meaning.chunk
            assert bool(meaning.allowed(positions)[row, column]) == sees


def test_ids_are_below_the_vocabulary() -> None:
    """Capture traces with the ids 0 .. 12, which must all exist."""
    assert VOCAB > 13
