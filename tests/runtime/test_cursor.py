"""A prefill apart from the batch: what it computes in which order, and what it holds on to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from toy_runner import ToyRunner, toy_logits

from chunkc.config import ResolvedSampling
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.cursor import PrefillCursor
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request, RequestStatus


class World:
    """Requests with so many tokens each, of which so many are in the cache."""

    def __init__(self, *sizes: tuple[int, int]) -> None:
        self.runner = ToyRunner(256, 4)
        self.pool = PagePool(256, 4, len(sizes))
        self.requests = []
        for number, (length, computed) in enumerate(sizes):
            prompt = np.arange(length) * 7 % 97
            made = Request.create(str(number), number, prompt, ResolvedSampling(max_new_tokens=1), RequestMetrics(0.0))
            made.row, made.status = self.pool.open_row(), RequestStatus.RUNNING
            self.pool.extend(made.row, self.pool.pages_for(length))
            made.num_computed = computed
            if computed:
                self.runner.run(pack([Chunk(made, 0, computed)], self.pool))
            self.requests.append(made)

    def cursor(self, order: str, limit: float | None, ends: list[int] | None = None) -> PrefillCursor:
        """Over what is left of all requests, or up to ``ends``."""
        ends = ends or [request.num_tokens for request in self.requests]
        chunks = [Chunk(r, r.num_computed, end) for r, end in zip(self.requests, ends, strict=True)]
        return PrefillCursor(self.runner, self.pool, chunks, order=order, piece_limit=limit)


def walk(cursor: PrefillCursor) -> list[tuple[int, int]]:
    """Runs it to its end; (piece, part) in the order in which they ran."""
    ran = []
    while not cursor.done:
        piece = cursor.next_piece
        ran.append((cursor.pieces.index(piece), piece.forward.next_part if piece.forward else 0))
        cursor.advance()
    return ran


def test_tokens_first_is_one_piece_after_another():
    assert walk(World((9, 0)).cursor("tokens", 3)) == [(piece, part) for piece in range(3) for part in range(3)]


def test_layers_first_takes_all_pieces_through_a_part_before_the_next():
    assert walk(World((9, 0)).cursor("layers", 8.0)) == [(piece, part) for part in range(3) for piece in range(3)]


def test_without_a_limit_nothing_is_cut():
    assert walk(World((9, 0), (5, 2)).cursor("layers", None)) == [(0, 0), (0, 1), (0, 2)]


sizes = st.lists(
    st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1))), min_size=1, max_size=4
)


@given(sizes, st.sampled_from(["tokens", "layers"]), st.one_of(st.none(), st.floats(0.5, 60)))
@example([(24, 0)], "layers", 1.0)  # less than a row costs
def test_pieces_are_the_chunks_and_give_the_models_logits(sizes, order, limit):
    world = World(*sizes)
    cursor = world.cursor(order, limit)
    covered = [(c.request, position) for p in cursor.pieces for c in p.chunks for position in range(c.start, c.end)]
    assert covered == [(c.request, position) for c in cursor.chunks for position in range(c.start, c.end)]
    dearest = max(world.runner.row_costs(np.array([chunk.end - 1])).item() for chunk in cursor.chunks)
    for piece in cursor.pieces:
        positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in piece.chunks])
        costs = world.runner.row_costs(positions)
        assert piece.work == pytest.approx(costs.sum())
        size = len(positions) if order == "tokens" else costs.sum()
        assert limit is None or size <= limit + (1 if order == "tokens" else 2 * dearest) + 1e-6
    assert len(walk(cursor)) == cursor.parts_done == len(cursor.pieces) * world.runner.num_parts
    assert cursor.error is None
    logits = {r: row for piece in cursor.pieces for r, row in zip(piece.samplers, piece.logits, strict=False)}
    assert list(logits) == world.requests
    for request, row in logits.items():
        assert torch.equal(row, toy_logits(request.tokens[: request.num_tokens]))


def test_layers_first_cuts_by_cost_so_that_late_pieces_are_shorter():
    cursor = World((40, 0)).cursor("layers", 60.0)
    counts = [piece.num_tokens for piece in cursor.pieces]
    assert counts == sorted(counts, reverse=True) and counts[0] > 2 * counts[-1]


def test_a_part_of_a_prompt_gives_no_logits_to_sample():
    world = World((9, 0))
    cursor = world.cursor("tokens", 3, ends=[6])
    walk(cursor)
    assert [piece.samplers for piece in cursor.pieces] == [[], []]


def test_pages_are_held_from_start_to_close():
    world = World((9, 0), (5, 0))
    cursor = world.cursor("tokens", None)
    first, second = world.requests
    world.pool.close_row(first.row)
    assert (world.pool.num_free, world.pool.num_closing) == (256 - 5, 3)
    with pytest.raises(ValueError, match="not open"):
        world.pool.close_row(first.row)
    assert not world.pool.has_free_row
    walk(cursor)
    cursor.close()
    assert (world.pool.num_free, world.pool.num_closing) == (256 - 2, 0)
    assert world.pool.num_held(second.row) == 2
    world.pool.check()


def test_what_the_model_raises_ends_the_cursor():
    world = World((9, 0))
    cursor = world.cursor("tokens", 3)
    cursor.advance()

    def fail(batch, part):
        raise RuntimeError("broken")

    world.runner.before_part = fail
    cursor.advance()
    assert cursor.done and str(cursor.error) == "broken" and cursor.next_piece is None and cursor.parts_done == 1


def test_a_row_is_pinned_once():
    world = World((9, 0))
    world.cursor("tokens", None)
    with pytest.raises(ValueError, match="pinned already"):
        world.pool.pin(world.requests[0].row)
