"""How many pages the key/value cache gets."""

from __future__ import annotations

import psutil

from chunkc.errors import CapacityError
from chunkc.runtime.control_groups import memory_left

#: part of the memory that is free now which the cache may take where the user says nothing
DEFAULT_SHARE = 0.3


def choose_num_pages(
    *,
    num_pages: int | None,
    cache_memory: int | None,
    bytes_per_page: int,
    page_size: int,
    max_requests: int,
    max_positions: int,
) -> int:
    """Pages in the cache, from what the user gave or from the memory that is free.

    Args:
        num_pages: given in pages, or None.
        cache_memory: given in bytes, or None.
        bytes_per_page: over all layers, keys and values.
        page_size: tokens per page.
        max_requests, max_positions: more pages than these can ever use are not made.

    Raises:
        CapacityError: the memory given or free does not hold one page.
    """
    if num_pages is not None:
        return num_pages
    source = "cache_memory"
    if cache_memory is None:
        cache_memory = int(available_memory() * DEFAULT_SHARE)
        source = f"{DEFAULT_SHARE:.0%} of the free memory"
    pages = cache_memory // bytes_per_page
    if pages < 1:
        raise CapacityError(
            f"{source} is {cache_memory} bytes, less than one page of {page_size} tokens ({bytes_per_page} bytes); "
            "give more cache_memory or a smaller page_size"
        )
    return min(pages, max_requests * -(-max_positions // page_size))


def available_memory() -> int:
    """Bytes this process may still take: what the machine has free, within its control groups' limits."""
    available, left = psutil.virtual_memory().available, memory_left()
    return available if left is None else min(available, left)
