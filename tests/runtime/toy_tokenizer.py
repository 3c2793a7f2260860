"""A byte-level tokenizer with the parts of HuggingFace's interface that the runtime uses."""

from __future__ import annotations

from types import SimpleNamespace

EOS = 0


class ByteTokenizer:
    """Token ``b + 1`` is byte ``b``; token 0 is special. Incomplete characters decode as U+FFFD."""

    vocab_size = 257

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[byte + 1 for byte in text.encode()])

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        special = b"" if skip_special_tokens else b"<eos>"
        pieces = (bytes([token - 1]) if token else special for token in ids)
        return b"".join(pieces).decode(errors="replace")

    def apply_chat_template(self, messages, add_generation_prompt, tokenize, return_dict):
        assert tokenize and not return_dict
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages)
        return self(text + ("<assistant>" if add_generation_prompt else "")).input_ids
