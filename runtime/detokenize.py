"""Text of a request, token by token.

Decoding token by token is wrong (a character may span tokens, a space may belong to the next one) and
decoding everything again at each token is quadratic. So a window of the last tokens is decoded and compared
with the part of its text that is known already::

    tokens   ....... | c c c c c c | t t t n        c: context, t: known, n: new
    window             `---- decoded ----'
    new text = decoded text minus the part that is known

The window is shortened now and then, at a point where the shorter one decodes to the same ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_CONTEXT = 6  # tokens kept as context when the window is shortened
_WINDOW = 24  # tokens in the window before that is tried
_UNFINISHED = "\ufffd"  # what decoders write for bytes that are not a character (yet)
_MAX_UNFINISHED = 8  # a character has at most 4 bytes, hence tokens; more of these stay what they are


class Detokenizer:
    """Turns the growing tokens of one request into text; special tokens are skipped.

    Args:
        tokenizer: anything with HuggingFace's ``decode(ids, skip_special_tokens=...)``.
        stop_strings: the text ends before the first of these.

    Attributes:
        stopped: whether a stop string was found. Nothing may be added afterwards.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stop_strings)
        self._longest_stop = max(map(len, self._stops), default=0)
        self._tokens: list[int] = []
        self._start = 0  # first token of the window
        self._known = ""  # text of the window that has been taken over
        self._text = ""  # all text taken over
        self._sent = 0  # characters of it given out
        self.stopped = False

    @property
    def text(self) -> str:
        """The text given out so far."""
        return self._text[: self._sent]

    def add(self, token: int) -> str:
        """Adds a token and returns the text that is now certain.

        Held back are an incomplete character and an ending that may become a stop string.
        """
        self._tokens.append(token)
        window = self._decode(self._start)
        if window.endswith(_UNFINISHED * _MAX_UNFINISHED):
            settled = window
        else:
            settled = window.rstrip(_UNFINISHED)
        if len(settled) > len(self._known):
            self._text += settled[len(self._known) :]
            self._known = settled
        if len(self._tokens) - self._start > _WINDOW and settled == window:
            self._shorten()
        return self._give_out(final=False)

    def finish(self) -> str:
        """Ends the request and returns what was held back."""
        if not self.stopped:
            if not self._stops:
                # Rarely a later token changes earlier text (a tokenizer that tidies up spaces). What was
                # given out stays; if it agrees with the whole, the ending is that of the whole.
                whole = self._decode(0)
                if whole.startswith(self.text):
                    self._text = whole
            else:
                self._text += self._decode(self._start)[len(self._known) :]
        return self._give_out(final=True)

    def _decode(self, start: int) -> str:
        return self._tokenizer.decode(self._tokens[start:], skip_special_tokens=True)

    def _shorten(self) -> None:
        start = len(self._tokens) - _CONTEXT
        ending = self._decode(start)
        # Special tokens only, half a character, or a space that the decoder drops at the start of a text: the
        # window stays as it is and the next token tries again.
        if ending and self._known.endswith(ending):
            self._start, self._known = start, ending

    def _give_out(self, final: bool) -> str:
        if self.stopped:
            return ""
        end = len(self._text)
        if self._stops:
            # Text given out holds no stop string and no beginning of one that went on: search the rest only.
            found = [at for stop in self._stops if (at := self._text.find(stop, self._sent)) >= 0]
            if found:
                self.stopped = True
                end = min(found)
            elif not final:
                end -= self._possible_stop()
        piece = self._text[self._sent : end]
        self._sent = end
        return piece

    def _possible_stop(self) -> int:
        """Length of the longest ending of the text that begins a stop string."""
        pending = self._text[max(self._sent, len(self._text) - self._longest_stop + 1) :]
        for at in range(len(pending)):
            if any(stop.startswith(pending[at:]) for stop in self._stops):
                return len(pending) - at
        return 0
