"""What is asked of the system about the memory of tensors: large pages, and to take back what is not needed."""

from __future__ import annotations

import ctypes
import mmap

import torch

_MADV_COLLAPSE = 25  # Linux 6.1; Python does not name it


def prefer_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask the system to back a CPU tensor with huge pages; True if it agreed. Contents stay as they are.

    The pages of a cache are read in no order, so that with 4 KiB pages nearly each of them costs a walk through the
    page table, during which fetching ahead stops: decodes take 20 to 50% longer. Call it right after allocation: what
    has not been touched becomes huge at the first touch, what has been is copied now.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE") or not _advise(tensor, mmap.MADV_HUGEPAGE):
        return False
    _advise(tensor, _MADV_COLLAPSE)  # of no use to untouched memory, and no harm where it is not known
    return True


def take_back(tensor: torch.Tensor) -> None:
    """Have the system take back the memory of a contiguous CPU tensor that nobody reads again.

    That is for a tensor in a file that is mapped as a whole, which lives as long as any tensor in it.
    """
    if hasattr(mmap, "MADV_DONTNEED"):
        _advise(tensor, mmap.MADV_DONTNEED)


def _advise(tensor: torch.Tensor, advice: int) -> bool:
    """Tell the system of the whole pages that a contiguous CPU tensor covers; whether there are some, and it agreed."""
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if tensor.device.type != "cpu" or end <= begin:
        return False
    area = (ctypes.c_void_p(begin), ctypes.c_size_t(end - begin))
    return bool(ctypes.CDLL(None).madvise(*area, ctypes.c_int(advice)) == 0)
