"""What the serving benchmark says at its end: the table, the comparison of tokens, the closing ratio."""

from __future__ import annotations

from chunkc.bench.metrics import RunResult, first_difference, median, spread

Rows = dict[str, list[RunResult]]  # configuration -> its runs, in the order of the table

_COLUMNS = (
    # heading, figure, format
    ("wall\ns", "wall_s", ".2f"),
    ("in\ntok/s", "prompt_tok_s", ".0f"),
    ("out\ntok/s", "output_tok_s", ".1f"),
    ("TTFT\np50", "ttft_p50_ms", ".0f"),
    ("TTFT\np99", "ttft_p99_ms", ".0f"),
    ("ITL\np50", "itl_p50_ms", ".1f"),
    ("ITL\np99", "itl_p99_ms", ".1f"),
    ("ITL\nmax", "itl_max_ms", ".0f"),
    ("decode\np99", "dec_itl_p99_ms", ".1f"),
    ("steps", "steps", ".0f"),
)


def render(rows: Rows) -> str:
    """The table: a row per configuration, medians over its runs, times in ms."""
    from tabulate import tabulate

    headings = ["", *(heading for heading, _, _ in _COLUMNS), "tokens/step\ndec + pre", "spread"]
    body = []
    for config, results in rows.items():
        cells = [_cell(median(results, figure), form) for _, figure, form in _COLUMNS]
        decode, prefill = median(results, "decode_per_step"), median(results, "prefill_per_step")
        batch = "-" if decode is None or prefill is None else f"{decode:.1f} + {prefill:.1f}"
        body.append([config, *cells, batch, _cell(spread(results, "wall_s"), ".0%")])
    alignment = ("left", *("right" for _ in headings[1:]))
    return tabulate(body, headers=headings, colalign=alignment, disable_numparse=True, tablefmt="simple")


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def compare_tokens(rows: Rows, dtype: str) -> str:
    """Says whether all runs of all configurations made the same tokens, and where they first part if not."""
    runs = [(config, result) for config, results in rows.items() for result in results]
    first_config, first = runs[0]
    parted = []
    for config, result in runs[1:]:
        difference = first_difference(first, result)
        if difference:
            parted.append(f"{config}, run {result.run}, request {difference[0]} from token {difference[1]}")
    count = f"{len(runs)} runs of {len(rows)} configurations"
    if not parted:
        return f"Tokens: equal in all {count}." if len(runs) > 1 else "Tokens: one run, nothing to compare with."
    why = "" if dtype == "float32" else f" ({dtype} rounds differently in batches of different shapes)"
    return f"Tokens: NOT equal in all {count}{why}; they part from {first_config} at: {'; '.join(parted)}."


def closing_line(rows: Rows, whole: str, chunked: str | None) -> str | None:
    """The ratio of decode ITL p99 between whole prefill and a chunked row; None where one is missing."""
    if chunked is None or whole not in rows or chunked not in rows:
        return None
    figure = "dec_itl_p99_ms" if median(rows[whole], "dec_itl_p99_ms") is not None else "itl_p99_ms"
    before, after = median(rows[whole], figure), median(rows[chunked], figure)
    if not before or not after:
        return None
    name = "Decode ITL" if figure.startswith("dec_") else "ITL"
    return f"{name} p99: {whole} {before:.0f} ms, {chunked} {after:.0f} ms: a ratio of {before / after:.1f}."
