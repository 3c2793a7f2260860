"""Kinds of command-line arguments."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """An integer of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer >= 1, not {text!r}")
    return int(text)


def budget(text: str) -> int | None:
    """A token budget; None for "whole"."""
    return None if text == "whole" else positive(text)
