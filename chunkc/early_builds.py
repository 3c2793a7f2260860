"""The native libraries, built while a model is loaded: compilers are processes, which another core can run."""

from __future__ import annotations

import contextlib
import threading

from chunkc.kernels import libraries
from chunkc.kernels.native import instruction_sets

_COMPILERS = 2  # at a time; one more, and this process would wait for them


def begin() -> None:
    """Have the libraries built that the cache lacks, and return at once.

    Who needs one waits for its lock, and meets the error of a build that failed by building it again.
    """
    wanted = [libraries.LINEAR, libraries.ATTENTION, libraries.PLANNER]
    if "avx512f" not in instruction_sets():  # most likely no kernel of ours
        wanted.append(libraries.ONEDNN)
    missing = [library for library in wanted if not library.is_built()]

    def build() -> None:
        while missing:
            with contextlib.suppress(Exception):
                missing.pop(0).find_or_build()

    for _ in range(min(_COMPILERS, len(missing))):
        threading.Thread(target=build, name="chunkc-build", daemon=True).start()
