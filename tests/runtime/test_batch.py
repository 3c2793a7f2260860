from __future__ import annotations

import numpy as np
import pytest
import torch

from chunkc.config import ResolvedSampling
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.pages import PagePool
from chunkc.runtime.request import Request


def running(pool: PagePool, number: int, tokens: range) -> Request:
    request = Request.create(
        f"r{number}", number, np.array(tokens), ResolvedSampling(max_new_tokens=4), RequestMetrics(0.0)
    )
    request.row = pool.open_row()
    pool.extend(request.row, pool.pages_for(len(tokens)))
    return request


def test_the_picture_in_the_docstring():
    pool = PagePool(num_pages=40, page_size=4, max_rows=3)
    a = running(pool, 0, range(100, 141))
    b = running(pool, 1, range(200, 209))
    c = running(pool, 2, range(300, 310))
    batch = pack([Chunk(a, 40, 41), Chunk(b, 0, 3), Chunk(c, 8, 10)], pool)
    meta = batch.attention
    assert batch.input_ids.tolist() == [140, 200, 201, 202, 308, 309]
    assert batch.positions.tolist() == [40, 0, 1, 2, 8, 9]
    assert meta.q_offsets.tolist() == [0, 1, 4, 6] and meta.kv_lens.tolist() == [41, 3, 10]
    assert batch.logits_rows.tolist() == [0, 5], "b has not reached its last token"
    assert meta.page_table.shape == (3, 11)
    for row, position, slot in zip([0, 1, 1, 1, 2, 2], batch.positions, meta.slot_mapping, strict=True):
        assert slot == meta.page_table[row, position // 4] * 4 + position % 4
    assert meta.q_offsets.dtype == meta.kv_lens.dtype == meta.page_table.dtype == torch.int32
    assert meta.slot_mapping.dtype == batch.input_ids.dtype == batch.logits_rows.dtype == torch.int64


def test_without_a_sampling_chunk_the_last_row_stands_in():
    pool = PagePool(8, 4, 1)
    batch = pack([Chunk(running(pool, 0, range(9)), 0, 5)], pool)
    assert batch.logits_rows.tolist() == [4] and batch.num_tokens == 5


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
def test_any_page_size(page_size):
    pool = PagePool(300, page_size, 2)
    a, b = running(pool, 0, range(130)), running(pool, 1, range(70))
    batch = pack([Chunk(a, 129, 130), Chunk(b, 7, 70)], pool)
    where = {(r, t): pool.table[q.row, t // page_size] * page_size + t % page_size
             for r, q in enumerate([a, b]) for t in range(q.num_tokens)}  # fmt: skip
    assert batch.attention.slot_mapping.tolist() == [where[0, 129]] + [where[1, t] for t in range(7, 70)]


def test_batches_do_not_share_memory():
    pool = PagePool(8, 4, 1)
    request = running(pool, 0, range(9))
    first = pack([Chunk(request, 0, 9)], pool)
    before = [t.clone() for t in (first.input_ids, first.positions, first.attention.page_table)]
    request.tokens[:] = 1
    pool.table[:] = 5
    pack([Chunk(request, 0, 9)], pool)
    for old, now in zip(before, (first.input_ids, first.positions, first.attention.page_table), strict=True):
        assert torch.equal(old, now)
