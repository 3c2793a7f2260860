"""Memory that is free goes back to the system, where others may need it and where it is counted."""

from __future__ import annotations

import contextlib
import ctypes
import gc


def give_back() -> None:
    """Collect garbage, and return what the C library holds of freed memory, where it can do that."""
    gc.collect()
    trim()


def trim() -> None:
    """Return what the C library holds of freed memory, where it can do that: glibc keeps pieces below 32 MB."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
