from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunkc.errors import CapacityError
from chunkc.runtime.pages import PagePool


def test_pages_go_out_and_come_back():
    pool = PagePool(num_pages=5, page_size=4, max_rows=2)
    a, b = pool.open_row(), pool.open_row()
    pool.extend(a, 2)
    pool.extend(b, 3)
    assert pool.num_free == 0 and pool.num_used == 5
    assert sorted([*pool.table[a, :2], *pool.table[b, :3]]) == [0, 1, 2, 3, 4]
    assert pool.capacity(a) == 8 and pool.num_held(b) == 3
    pool.check()
    pool.close_row(a)
    assert pool.num_free == 2
    pool.close_row(b)
    pool.check()


def test_too_many_pages_change_nothing():
    pool = PagePool(3, 1, 1)
    row = pool.open_row()
    pool.extend(row, 2)
    with pytest.raises(CapacityError, match="2 pages wanted, 1 of 3"):
        pool.extend(row, 2)
    assert pool.num_held(row) == 2 and pool.num_free == 1
    with pytest.raises(CapacityError, match="all 1 rows"):
        pool.open_row()
    pool.check()


def test_a_row_is_not_given_back_twice():
    pool = PagePool(3, 1, 2)
    row = pool.open_row()
    pool.close_row(row)
    with pytest.raises(ValueError, match="not open"):
        pool.close_row(row)
    with pytest.raises(ValueError, match="not open"):
        pool.extend(row, 1)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_sizes_must_be_positive(sizes):
    with pytest.raises(ValueError, match="at least 1"):
        PagePool(*sizes)


def test_check_finds_a_lost_and_a_shared_page():
    pool = PagePool(3, 1, 1)
    row = pool.open_row()
    pool.extend(row, 1)
    page = int(pool.table[row, 0])
    pool.table[row, 0] = (page + 1) % 3
    with pytest.raises(AssertionError, match=rf"pages \[{page}\] are neither"):
        pool.check()
    pool._held[row] = 0
    pool.table[row, 0] = page
    with pytest.raises(AssertionError, match="neither free nor held"):
        pool.check()


@pytest.mark.parametrize("page_size, tokens, pages", [(16, 0, 0), (16, 1, 1), (16, 16, 1), (16, 17, 2), (1, 3, 3)])
def test_pages_for(page_size, tokens, pages):
    assert PagePool(4, page_size, 1).pages_for(tokens) == pages


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90)), max_size=60))
def test_nothing_is_lost_whatever_happens(moves):
    pool = PagePool(num_pages=200, page_size=2, max_rows=6)
    rows: dict[int, int] = {}
    pages: dict[int, list[int]] = {}
    for who, count in moves:
        if who not in rows:
            rows[who], pages[who] = pool.open_row(), []
        elif count % 3 == 0:
            pool.close_row(rows.pop(who))
            del pages[who]
            continue
        if count <= pool.num_free:
            pool.extend(rows[who], count)
            pages[who] = pool.table[rows[who], : pool.num_held(rows[who])].tolist()
        pool.check()
        for other, row in rows.items():
            # Growing the table, or others, never changes what a request holds.
            np.testing.assert_array_equal(pool.table[row, : pool.num_held(row)], pages[other])
