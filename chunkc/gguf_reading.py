"""Lets transformers read a GGUF file once, and without an object of a file mapping for every word of a vocabulary.

transformers opens the file for the configuration, for the tokenizer and for the weights, each time through all of its
metadata, and lists the names that tensors may have anew for every module. For a model of 135M parameters that is most
of the time and half of the memory that loading takes.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import numpy as np

_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Within it, what the gguf package read of a file is kept. Without that package, nothing is done.

    One thread at a time: two would restore each other's changes to the package, and one's would stay.
    """
    try:
        import gguf
    except ImportError:  # transformers says so
        yield
        return
    with _one_at_a_time, _patched(gguf):
        yield


@contextlib.contextmanager
def _patched(gguf: ModuleType) -> Iterator[None]:
    import numpy

    mappings: list[mmap.mmap] = []

    class Reader(gguf.GGUFReader):
        """Holds the file as a plain array: pieces of it are then plain too, which a mapping's are not."""

        @property
        def data(self) -> np.ndarray:
            return self._data

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._data = numpy.asarray(mapped)
            if isinstance(mapped.base, mmap.mmap):
                mappings.append(mapped.base)

    def dequantize(*arguments: Any) -> np.ndarray:
        result: np.ndarray = original(*arguments)
        for mapping in mappings if hasattr(mmap, "MADV_DONTNEED") else ():
            mapping.madvise(mmap.MADV_DONTNEED)  # what was read of the file is not needed twice
        return result

    original = gguf.dequantize
    with (
        mock.patch.object(gguf, "dequantize", dequantize),
        mock.patch.object(gguf, "GGUFReader", functools.cache(Reader)),
        mock.patch.object(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map)),
    ):
        yield
