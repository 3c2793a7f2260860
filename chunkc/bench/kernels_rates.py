"""What the machine can do at most, measured: memory reads, and products of tiles that lie in the cache."""

from __future__ import annotations

import ctypes
import time

import torch

from chunkc.errors import ChunkcError
from chunkc.kernels import libraries
from chunkc.kernels.cpu_memory import prefer_huge_pages

ROWS = 64  # M of the products
_READ_BYTES = 256 * 1024**2  # far beyond the caches
_PRODUCT_OPERATIONS = 1e9  # of a measurement, per thread


class MachineRates:
    """Measures when asked, so that it can take turns with what is compared with it."""

    def __init__(self, quick: bool) -> None:
        path = libraries.RATES.find_or_build()
        if path is None:
            raise ChunkcError("measuring what the machine can do needs a C++ compiler")
        self._library = ctypes.CDLL(str(path))
        for name in ("chunkc_read_rate", "chunkc_run_read_rate", "chunkc_brgemm_rate", "chunkc_own_rate"):
            getattr(self._library, name).restype = ctypes.c_double
        self._memory = torch.empty(_READ_BYTES // (4 if quick else 1) // 8, dtype=torch.int64)
        prefer_huge_pages(self._memory)
        self._memory.fill_(1)

    def read(self, threads: int) -> float:
        """Bytes per second read from memory."""
        size = self._memory.nbytes // (256 * threads) * 256 * threads
        pointer = ctypes.c_void_p(self._memory.data_ptr())
        return self._library.chunkc_read_rate(pointer, ctypes.c_int64(size), ctypes.c_int64(threads))

    def read_runs(self, size: int, threads: int) -> float:
        """Bytes per second read from memory in runs of ``size`` bytes, a multiple of 256, that lie anywhere."""
        sizes = (ctypes.c_int64(number) for number in (self._memory.nbytes, size, threads))
        return self._library.chunkc_run_read_rate(ctypes.c_void_p(self._memory.data_ptr()), *sizes)

    def product(self, dtype: torch.dtype, dim: int, threads: int) -> tuple[float, str]:
        """Operations per second of ``[64, dim] x [dim, dim]``, and by what: brgemm, or torch where it has none."""
        rate = self._call("chunkc_brgemm_rate", dtype, dim, threads)
        return (rate, "brgemm") if rate else (_matmul_rate(dtype, dim), "torch.bmm")

    def own_product(self, dtype: torch.dtype, dim: int, threads: int) -> float:
        """The same by the register tiles that attention itself uses."""
        return self._call("chunkc_own_rate", dtype, dim, threads)

    def _call(self, name: str, dtype: torch.dtype, dim: int, threads: int) -> float:
        count = int(_PRODUCT_OPERATIONS / (2 * ROWS * dim * dim))
        sizes = (ctypes.c_int64(size) for size in (ROWS, dim, dim, count, threads))
        return getattr(self._library, name)(int(dtype == torch.bfloat16), *sizes)


def _matmul_rate(dtype: torch.dtype, dim: int) -> float:
    a, b = torch.ones(256, ROWS, dim, dtype=dtype), torch.ones(256, dim, dim, dtype=dtype)
    out = torch.bmm(a, b)
    started = time.perf_counter()
    torch.bmm(a, b, out=out)
    return 2 * a.numel() * dim / (time.perf_counter() - started)
