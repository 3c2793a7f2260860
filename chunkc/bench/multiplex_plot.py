"""The points of the multiplex benchmark as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chunkc.errors import ChunkcError

if TYPE_CHECKING:
    from chunkc.bench.multiplex import Row


def check(path: Path) -> None:
    """Whether a picture can be written there, before the measurements.

    Raises:
        ChunkcError: matplotlib is missing, does not know the format, or there is no such folder.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ChunkcError("--plot needs matplotlib: pip install matplotlib (or chunkc[plot])") from error
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        raise ChunkcError(f"cannot draw {path}: its name must end in one of .{', .'.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise ChunkcError(f"cannot write {path}: there is no folder {path.parent}")


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Prefill tokens per second over decode ITL p99, a line for each mode, a point for each budget."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for mode, label in (("off", "one batch"), ("layers", "layers"), ("streams", "streams")):
        points = sorted(
            (row.median("itl_p99_ms"), row.median("prefill_tok_s"), "whole" if row.budget is None else str(row.budget))
            for row in rows
            if row.mode == mode and row.median("prefill_tok_s") is not None
        )
        if not points:
            continue
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=label)
        for x, y, name in points:
            axes.annotate(name, (x, y), textcoords="offset points", xytext=(5, -9), fontsize=8)
    alone = [row.median("itl_p99_ms") for row in rows if row.median("prefill_tok_s") is None]
    for x in alone:
        axes.axvline(x, linestyle=":", color="grey", label="decode alone")
    axes.set(xscale="log", xlabel="decode ITL p99, ms", ylabel="prefill, tokens/s", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
