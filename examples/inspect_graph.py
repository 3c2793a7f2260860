"""Look at what the compiler did: the table of passes, and the graph before and after each of them.

python examples/inspect_graph.py [FOLDER]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import chunkc


def main(folder: str | None = None) -> None:
    dump = Path(folder or tempfile.mkdtemp(prefix="chunkc-graphs-"))
    # mode="eager" leaves out the last step, compiling the graph: what the passes do is the same.
    engine = chunkc.compile("SmolLM2-135M-Instruct", mode="eager", dump=dump)

    print(engine.explain())
    print(f"\nGraphs in {dump}:")
    for file in sorted(dump.iterdir()):
        print(f"    {file.name:40} {len(file.read_text().splitlines()):6} lines")


if __name__ == "__main__":
    main(*sys.argv[1:])
