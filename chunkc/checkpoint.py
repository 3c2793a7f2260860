"""The weights of a folder in the HuggingFace layout, read from its safetensors files where they lie.

Files are mapped into memory: a tensor costs no memory until it is read, and none after ``cpu_memory.take_back``.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: names of dtypes in the files
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LONGEST_HEADER = 100_000_000  # bytes, the format's own limit


@dataclass(frozen=True)
class _Place:
    """Where a tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name."""

    _places: dict[str, _Place]
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor of that name."""
        return self._places[name].shape

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a name, over the mapped file: what is written to it stays in this process.

        Raises:
            OSError: the file cannot be read any more.
        """
        place = self._places[name]
        count = math.prod(place.shape)
        if count == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        if place.file not in self._maps:
            with open(place.file, "rb") as file:
                self._maps[place.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(self._maps[place.file], dtype=place.dtype, count=count, offset=place.offset)
        return flat.view(place.shape)


def open_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder; None where it has none that is whole and of known dtypes."""
    try:
        places: dict[str, _Place] = {}
        for file in _files(folder):
            header = _header(file)
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    if name in places:
                        return None
                    places[name] = _place(file, 8 + len(header), entry)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return Checkpoint(places) if places else None


def _files(folder: Path) -> tuple[Path, ...]:
    """The files that transformers takes: one, or those of an index."""
    if (folder / SINGLE).is_file():
        return (folder / SINGLE,)
    names = json.loads((folder / INDEX).read_text())["weight_map"].values()
    return tuple(folder / name for name in sorted(set(names)))


def _header(file: Path) -> bytes:
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if length > _LONGEST_HEADER:
            raise ValueError("no safetensors file")
        header = opened.read(length)
    if len(header) != length:
        raise ValueError("half a safetensors file")
    return header


def _place(file: Path, data: int, entry: Any) -> _Place:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
    begin, end = entry["data_offsets"]
    fits = end - begin == math.prod(shape) * dtype.itemsize and 0 <= begin and data + end <= file.stat().st_size
    if not fits or (data + begin) % dtype.itemsize:
        raise ValueError("no safetensors file whose tensors can be used where they lie")
    return _Place(file, dtype, shape, data + begin)
