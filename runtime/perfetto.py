"""A run as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process a run. Its first row are the engine's steps with what they were made of; below it is a row for each set of
cores: "all cores" where batch and prefill take turns, "decode cores" and "prefill cores" where they run side by side.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from typing import Any

from chunkc.runtime.metrics import EngineMetrics

_ROWS = ("steps", "all cores", "decode cores", "prefill cores")


def trace_events(metrics: EngineMetrics, *, process: int = 1, name: str = "chunkc") -> list[dict[str, Any]]:
    """The events of one run, for the list ``traceEvents`` of a trace file.

    Args:
        metrics: of the run; its latest steps and spans are shown.
        process: number of the run in the file.
        name: of the run.
    """
    used = {"steps", *(span.lane for span in metrics.spans)}
    events: list[dict[str, Any]] = [_meta("process_name", process, 0, name)]
    for thread, row in enumerate(_ROWS):
        if row in used:
            events.append(_meta("thread_name", process, thread, row))
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": process, "tid": thread, "args": {"sort_index": thread}}
            )
    for record in metrics.records:
        what = {
            "decode tokens": record.decode_tokens,
            "prefill tokens": record.prefill_tokens,
            "budget": record.budget,
            "multiplex": record.mode,
            "prefill apart": record.apart,
            "waiting": record.waiting,
            "pages used": record.pages_used,
            "preemptions": record.preemptions,
        }
        title = f"{record.decode_tokens} + {record.prefill_tokens}"
        events.append(_span(title, process, 0, record.start, record.start + record.total_s, what))
        events.append(
            {
                "ph": "C",
                "name": "pages used",
                "pid": process,
                "ts": record.start * 1e6,
                "args": {"pages": record.pages_used},
            }
        )
    for span in metrics.spans:
        what = {"tokens": span.tokens} if span.parts is None else {"tokens": span.tokens, "parts": span.parts}
        events.append(_span(f"{span.name} {span.tokens}", process, _ROWS.index(span.lane), span.start, span.end, what))
    return events


def _span(name: str, process: int, thread: int, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": process,
        "tid": thread,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "args": args,
    }


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}
