"""``python -m chunkc.cache``: what earlier starts kept on disk (graphs, models, starts), and to clear it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from tabulate import tabulate

from chunkc import artifacts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m chunkc.cache", description=__doc__)
    parser.add_argument("command", nargs="?", choices=("list", "clear"), default="list")
    if parser.parse_args(arguments).command == "clear":
        count = artifacts.clear()
        print(f"deleted {count} {'entry' if count == 1 else 'entries'}")
        return 0
    found = artifacts.entries()
    rows = [
        (folder.name, f"{size / 1024:.0f}", time.strftime("%Y-%m-%d %H:%M", time.localtime(used)))
        for folder, size, used in found
    ]
    print(tabulate(rows, ["entry", "KiB", "last used"], colalign=("left", "right", "left")) if rows else "no entries")
    total = sum(size for _, size, _ in found) / 2**20
    print(f"{total:.1f} MiB in {artifacts.cache_dir()} (at most {artifacts.DEFAULT_LIMIT / 2**20:.0f})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
