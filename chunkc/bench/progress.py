"""Progress of long work on stderr: a line per stage, and on a terminal a spinner with the time it takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stage(text: str) -> Iterator[None]:
    """Show that `text` is going on, and leave a line with the seconds it took."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    started = time.perf_counter()
    if console.is_terminal:
        with console.status(text):
            yield
    else:
        console.print(f"{text} ...", markup=False)
        yield
    console.print(f"{text}: {time.perf_counter() - started:.1f} s", markup=False)
