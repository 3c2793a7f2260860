"""Pages of the key/value cache: who holds which.

The cache is ``num_pages`` pages of ``page_size`` tokens. A request that runs owns one *row* of a table; the
row lists its pages in the order of its tokens, so token ``t`` lies in page ``table[row, t // page_size]`` at
offset ``t % page_size``. With the rows in one array a step gathers its page table in one indexing call.

    row 0   | 7 | 2 | . |        request A, 20 tokens, page_size 16
    row 1   | 5 | . | . |        request B, 3 tokens
    free    1 0 3 4 6
"""

from __future__ import annotations

import numpy as np

from chunkc.errors import CapacityError


class PagePool:
    """Hands out rows and pages, takes them back, and can prove that none got lost.

    Args:
        num_pages: pages in the cache, at least 1.
        page_size: tokens per page, at least 1.
        max_rows: requests that may hold pages at the same time.

    Attributes:
        table: int32 ``[max_rows, width]``, page ids; row ``r`` is valid up to ``num_held(r)``. The width
            grows with the longest request, up to ``num_pages``.
    """

    def __init__(self, num_pages: int, page_size: int, max_rows: int) -> None:
        if min(num_pages, page_size, max_rows) < 1:
            raise ValueError("num_pages, page_size and max_rows must be at least 1")
        self.num_pages, self.page_size, self.max_rows = num_pages, page_size, max_rows
        self.table = np.zeros((max_rows, min(num_pages, 64)), dtype=np.int32)
        # A stack: the pages given back last are handed out first, their memory is the warmest.
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages
        self._held = [0] * max_rows
        self._open = [False] * max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._pinned: set[int] = set()
        self._closing: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Pages that requests hold, and those that are kept for pinned rows."""
        return self.num_pages - self._num_free

    @property
    def has_free_row(self) -> bool:
        """Whether ``open_row`` would find a row."""
        return bool(self._free_rows)

    @property
    def num_closing(self) -> int:
        """Pages of rows that were closed while they were pinned."""
        return sum(self._held[row] for row in self._closing)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.page_size)

    def num_held(self, row: int) -> int:
        """Pages that a row holds."""
        return self._held[row]

    def capacity(self, row: int) -> int:
        """Tokens that fit into the pages that a row holds."""
        return self._held[row] * self.page_size

    def open_row(self) -> int:
        """A row without pages, for a request that starts to run.

        Raises:
            CapacityError: all rows are taken.
        """
        if not self._free_rows:
            raise CapacityError(f"all {self.max_rows} rows of the page table are taken")
        row = self._free_rows.pop()
        self._open[row] = True
        return row

    def extend(self, row: int, count: int) -> None:
        """Adds ``count`` pages to a row.

        Raises:
            CapacityError: fewer are free; the row is unchanged.
        """
        if not self._open[row]:
            raise ValueError(f"row {row} is not open")
        if count > self._num_free:
            raise CapacityError(f"{count} pages wanted, {self._num_free} of {self.num_pages} are free")
        held = self._held[row]
        if held + count > self.table.shape[1]:
            self._widen(held + count)
        rest = self._num_free - count
        self.table[row, held : held + count] = self._free[rest : self._num_free][::-1]
        self._num_free = rest
        self._held[row] = held + count

    def close_row(self, row: int) -> None:
        """Gives back a row and all its pages; those of a pinned row when its pin is taken off."""
        if not self._open[row] or row in self._closing:
            raise ValueError(f"row {row} is not open")
        if row in self._pinned:
            self._closing.add(row)
            return
        held = self._held[row]
        self._free[self._num_free : self._num_free + held] = self.table[row, :held][::-1]
        self._num_free += held
        self._held[row] = 0
        self._open[row] = False
        self._free_rows.append(row)

    def pin(self, row: int) -> None:
        """Keeps a row and its pages from being handed out again, even if it is closed: they are being written."""
        if not self._open[row] or row in self._pinned:
            raise ValueError(f"row {row} is not open, or pinned already")
        self._pinned.add(row)

    def unpin(self, row: int) -> None:
        """Takes off a pin, and closes the row if that was asked meanwhile."""
        self._pinned.remove(row)
        if row in self._closing:
            self._closing.remove(row)
            self.close_row(row)

    def check(self) -> None:
        """Proves that every page is either free or held by exactly one open row.

        Raises:
            AssertionError: a page is lost, or held twice; the message names it.
        """
        holders = np.zeros(self.num_pages, dtype=np.int64)
        for row, held in enumerate(self._held):
            assert self._open[row] or held == 0, f"closed row {row} holds {held} pages"
            np.add.at(holders, self.table[row, :held], 1)
        np.add.at(holders, self._free[: self._num_free], 1)
        lost, shared = np.flatnonzero(holders == 0), np.flatnonzero(holders > 1)
        assert lost.size == 0, f"pages {lost.tolist()} are neither free nor held"
        assert shared.size == 0, f"pages {shared.tolist()} are held more than once"
        assert sorted(self._free_rows) == [r for r in range(self.max_rows) if not self._open[r]], "a row is lost"

    def _widen(self, needed: int) -> None:
        width = min(max(needed, 2 * self.table.shape[1]), self.num_pages)
        wider = np.zeros((self.max_rows, width), dtype=np.int32)
        wider[:, : self.table.shape[1]] = self.table
        self.table = wider
