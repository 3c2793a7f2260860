"""Workloads: requests with arrival times. One is built in; others are read from JSON files.

A file holds a list of ``{"arrival_s": 0.0, "prompt_token_ids": [..], "max_new_tokens": 64}``, or an object of
such lists by name. Every request runs to its ``max_new_tokens``: greedy, end-of-sequence tokens ignored.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunkc.errors import ChunkcError

# The built-in workload: short prompts decode from the start, long prompts arrive while they do.
NUM_DECODING, SHORT_PROMPT, SHORT_NEW_TOKENS = 6, 40, 64
LONG_ARRIVALS_S, LONG_PROMPT, LONG_NEW_TOKENS = (0.4, 1.4, 2.4), 896, 8


class WorkloadError(ChunkcError):
    """A workload cannot be read. The message names the file, the request and the field."""


@dataclass(frozen=True)
class Request:
    """One request; `arrival_s` is in seconds after the start."""

    arrival_s: float
    prompt_token_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Workload:
    """A named list of requests in order of arrival."""

    name: str
    requests: tuple[Request, ...]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self.requests)

    @property
    def new_tokens(self) -> int:
        return sum(request.max_new_tokens for request in self.requests)

    @property
    def is_mixed(self) -> bool:
        """Whether some requests are there from the start and others arrive later."""
        return len({request.arrival_s > 0 for request in self.requests}) == 2

    def describe(self) -> str:
        return (
            f"{len(self.requests)} requests, {self.prompt_tokens} prompt tokens, "
            f"{self.new_tokens} new tokens, the last arrives at {self.requests[-1].arrival_s:g} s"
        )

    def warm_up(self) -> Workload:
        """The shortest and the longest prompt, a few new tokens each: enough to touch every kind of batch."""
        by_length = sorted(self.requests, key=lambda request: len(request.prompt_token_ids))
        ends = (by_length[0], by_length[-1])
        return Workload("warm-up", tuple(Request(0.0, r.prompt_token_ids, min(4, r.max_new_tokens)) for r in ends))


def load_workloads(path: Path, which: Sequence[str] | None = None) -> list[Workload]:
    """Read workloads from a JSON file.

    Args:
        path: a file as the module's docstring describes.
        which: names to take from a file of named lists, in this order; None takes all of them.

    Raises:
        WorkloadError: no such file, not JSON, a field missing or of the wrong kind, or an unknown name.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"cannot read the workload {path}: {error.strerror}") from error
    except ValueError as error:
        raise WorkloadError(f"the workload {path} is not JSON: {error}") from error
    if isinstance(content, list):
        if which:
            raise WorkloadError(f"{path} holds one list without a name, so there is nothing to choose with --which")
        content = {path.stem: content}
    if not isinstance(content, dict) or not content:
        raise WorkloadError(f"{path} must hold a list of requests, or an object of such lists by name")
    for name in which or ():
        if name not in content:
            raise WorkloadError(f"{path} has no workload {name!r}; it has {', '.join(map(str, content))}")
    return [_parse(path, name, content[name]) for name in which or content]


def _parse(path: Path, name: str, entries: Any) -> Workload:
    if not isinstance(entries, list) or not entries:
        raise WorkloadError(f"{path}: workload {name!r} must be a list with at least one request")
    requests = [_parse_request(f"{path}: request {i} of {name!r}", entry) for i, entry in enumerate(entries)]
    return Workload(name, tuple(sorted(requests, key=lambda request: request.arrival_s)))


def _parse_request(where: str, entry: Any) -> Request:
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where} must be an object, not {entry!r:.60}")
    missing = [key for key in ("arrival_s", "prompt_token_ids", "max_new_tokens") if key not in entry]
    if missing:
        raise WorkloadError(f"{where} lacks {', '.join(missing)}")
    arrival, prompt, new_tokens = entry["arrival_s"], entry["prompt_token_ids"], entry["max_new_tokens"]
    if not _is_number(arrival) or not math.isfinite(arrival) or arrival < 0:
        raise WorkloadError(f"{where}: arrival_s must be a number of seconds >= 0, not {arrival!r:.60}")
    if not isinstance(prompt, list) or not prompt or not all(_is_count(token) for token in prompt):
        raise WorkloadError(f"{where}: prompt_token_ids must be a non-empty list of integers >= 0")
    if not _is_count(new_tokens) or new_tokens < 1:
        raise WorkloadError(f"{where}: max_new_tokens must be an integer >= 1, not {new_tokens!r:.60}")
    return Request(float(arrival), tuple(prompt), new_tokens)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def builtin_workload(tokenizer: Any, vocab_size: int) -> Workload:
    """The workload of a run without ``--workload``; the same for every run with the same tokenizer.

    Args:
        tokenizer: turns the built-in text into ids; None takes arbitrary ids below `vocab_size` instead.
        vocab_size: of the model.
    """
    rng = random.Random(0)

    def prompt(opening: str, length: int) -> tuple[int, ...]:
        if tokenizer is None:
            return tuple(rng.randrange(vocab_size) for _ in range(length))
        text = opening
        while len(ids := tokenizer.encode(text)) < length:
            text += "".join(_sentence(rng) for _ in range(40))
        return tuple(ids[:length])

    short = [
        Request(0.0, prompt("Tell me a story about what happened next. ", SHORT_PROMPT), SHORT_NEW_TOKENS)
        for _ in range(NUM_DECODING)
    ]
    long = [
        Request(arrival, prompt("Summarise this logbook. ", LONG_PROMPT), LONG_NEW_TOKENS)
        for arrival in LONG_ARRIVALS_S
    ]
    return Workload("built-in", (*short, *long))


def _sentence(rng: random.Random) -> str:
    who = rng.choice(("The captain", "A young engineer", "The old baker", "My neighbour", "The night guard"))
    did = rng.choice(("counted", "repaired", "painted", "lost", "carried", "measured", "sold"))
    what = rng.choice(("copper pipes", "paper boats", "wooden doors", "brass clocks", "sacks of flour"))
    where = rng.choice(("by the harbour", "in the attic", "under the bridge", "behind the station"))
    return f"{who} {did} {rng.randint(2, 90)} {what} {where} before {rng.randint(1, 12)} o'clock. "
