"""What a user may pass as a prompt, and the token ids it becomes.

One prompt is a string, a list of token ids, or a chat (a list of ``{"role": ..., "content": ...}`` messages).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from chunkc.errors import InvalidRequestError

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Sequence[int] | Messages


def as_list(prompts: Any) -> list[Any]:
    """The prompts in what ``generate`` was given: one prompt or a list of them.

    A flat list of numbers or of messages is one prompt.
    """
    if isinstance(prompts, (str, bytes, Mapping)):
        return [prompts]
    if isinstance(prompts, (torch.Tensor, np.ndarray)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        return list(prompts) if hasattr(prompts, "__iter__") else [prompts]
    inner = (str, bytes, Sequence, torch.Tensor, np.ndarray)
    if len(prompts) == 0 or any(isinstance(item, inner) for item in prompts):
        return list(prompts)
    return [prompts]


def to_token_ids(prompt: Any, tokenizer: Any, vocab_size: int) -> np.ndarray:
    """Token ids of one prompt, int64 ``[n]``, n >= 1.

    Strings are tokenized with the tokenizer's special tokens, as ``tokenizer(text)`` does; chats go through
    its chat template, which brings its own, and ask for an answer.

    Raises:
        InvalidRequestError: what is wrong, where, and what to do about it.
    """
    if isinstance(prompt, str):
        _need(tokenizer, "a string")
        ids = tokenizer(prompt).input_ids
        if len(ids) == 0:
            raise InvalidRequestError("the prompt is empty: its text gives no token; pass some text")
    elif _is_chat(prompt):
        ids = _chat_ids(prompt, tokenizer)
    else:
        ids = prompt
    return _checked(ids, vocab_size)


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and all(isinstance(item, Mapping) for item in prompt)


def _chat_ids(messages: Messages, tokenizer: Any) -> Any:
    _need(tokenizer, "a chat")
    for index, message in enumerate(messages):
        missing = [key for key in ("role", "content") if key not in message]
        if missing:
            raise InvalidRequestError(f"message {index} of the chat has no {missing[0]!r}; each needs role and content")
    try:
        return tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template is a program of its own and raises what it likes
        raise InvalidRequestError(
            f"the tokenizer's chat template did not take the chat ({error}); pass text or token ids instead"
        ) from error


def _need(tokenizer: Any, what: str) -> None:
    if tokenizer is None:
        raise InvalidRequestError(
            f"the prompt is {what} and the engine has no tokenizer; pass token ids, or give chunkc.compile a tokenizer"
        )


def _checked(ids: Any, vocab_size: int) -> np.ndarray:
    if isinstance(ids, torch.Tensor):
        ids = ids.detach().cpu().numpy()
    if isinstance(ids, (bytes, Mapping)) or not isinstance(ids, (Sequence, np.ndarray)):
        raise InvalidRequestError(
            f"a prompt must be a string, a list of token ids or a list of chat messages, not {type(ids).__name__}"
        )
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise InvalidRequestError(
            f"a prompt must be one sequence of token ids, not an array of shape {tuple(ids.shape)}; pass its "
            "rows as a list of prompts, without padding"
        )
    if len(ids) == 0:
        raise InvalidRequestError("the prompt is empty; pass at least one token")
    if isinstance(ids, np.ndarray):
        if ids.dtype.kind not in "iu":
            raise InvalidRequestError(f"token ids must be integers, not {ids.dtype}")
    else:
        for kind in set(map(type, ids)):
            if kind is bool or not issubclass(kind, (int, np.integer)):
                at = next(index for index, item in enumerate(ids) if type(item) is kind)
                raise InvalidRequestError(
                    f"token ids must be integers; item {at} of the prompt is {ids[at]!r} ({kind.__name__})"
                )
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        at = next(index for index, item in enumerate(ids) if item == wrong)
        raise InvalidRequestError(
            f"token {int(wrong)} at place {at} of the prompt is outside the vocabulary "
            f"(0 to {vocab_size - 1}); was it made with another model's tokenizer?"
        )
    return np.asarray(ids, dtype=np.int64)
