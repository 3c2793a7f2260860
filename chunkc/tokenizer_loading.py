"""Loads the tokenizer of a model: by transformers' rules, or straight by the class that they led to before.

transformers is imported on first use. What its rules import is most of a model's code.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OWN, _RULES = "transformers.", "transformers.models.auto.tokenization_auto"


@dataclass(frozen=True)
class FoundTokenizer:
    """What there was.

    Attributes:
        tokenizer: a HuggingFace tokenizer, or None.
        missing: where there is none, a warning that says so.
    """

    tokenizer: Any
    missing: str | None = None


def load_tokenizer(source: Path | str, known_class: str | None = None) -> FoundTokenizer:
    """The tokenizer of a folder, or of a name on the HuggingFace hub.

    Args:
        known_class: what ``direct_class`` said of it. Not used where the rules are imported: they cost little then,
            and users may have registered classes with them.
    """
    try:
        if known_class is not None and known_class.startswith(_OWN) and _RULES not in sys.modules:
            return FoundTokenizer(_class(known_class).from_pretrained(source))
        import transformers

        return FoundTokenizer(transformers.AutoTokenizer.from_pretrained(source))
    except (OSError, ValueError, KeyError) as error:
        said = f"No tokenizer loaded from {source!s}, so prompts must be token ids ({first_line(error)})"
        return FoundTokenizer(None, said)


def direct_class(source: Path, tokenizer: Any) -> str | None:
    """The class that loads the same tokenizer without transformers' rules, or None where none is known to."""
    kind = type(tokenizer)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if not name.startswith(_OWN):
        return None
    try:
        again = _class(name).from_pretrained(source)
    except Exception:  # then it is loaded as ever
        return None
    return name if _described(again) == _described(tokenizer) else None


def first_line(error: Exception) -> str:
    """What is wrong, out of the many lines of transformers' messages; the chained error has the rest."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(" .:") if lines else type(error).__name__


def _class(name: str) -> Any:
    module, _, qualified = name.partition(":")
    return getattr(importlib.import_module(module), qualified)


def _described(tokenizer: Any) -> list[str]:
    """All that decides what a tokenizer does: its rules, and its members that are plain data."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else ""
    plain = (str, int, float, bool, list, tuple, dict, type(None))
    members = sorted((name, repr(value)) for name, value in vars(tokenizer).items() if isinstance(value, plain))
    return [str(type(tokenizer)), rules, repr(len(tokenizer)), repr(members)]
