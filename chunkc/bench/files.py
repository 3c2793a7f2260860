"""Files that a benchmark writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from chunkc.errors import ChunkcError


@contextmanager
def opened(path: Path | None) -> Iterator[TextIO | None]:
    """The file, opened before the work starts that fills it; None without a path.

    Raises:
        ChunkcError: it cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise ChunkcError(f"cannot write {path}: {error.strerror}") from error
    with file:
        yield file
