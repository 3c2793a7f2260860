"""From what a user passes to a request that is known to be servable."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from chunkc.config import GenerationDefaults, SamplingParams
from chunkc.errors import InvalidRequestError
from chunkc.runtime.outputs import RequestMetrics
from chunkc.runtime.prompts import to_token_ids
from chunkc.runtime.request import Request

Params = SamplingParams | Mapping[str, Any] | None


class Intake:
    """Checks requests and builds them; changes nothing but its counters, so it needs no lock.

    Args:
        vocab_size: token ids are below this.
        max_positions: positions of the model.
        cache_tokens: tokens that the whole cache holds.
        tokenizer: a HuggingFace tokenizer or None.
        defaults: the model's sampling defaults.
        clock: seconds.
        is_taken: whether a request of that name is known already; names made up avoid those.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_positions: int,
        cache_tokens: int,
        tokenizer: Any,
        defaults: GenerationDefaults,
        clock: Callable[[], float],
        is_taken: Callable[[str], bool],
    ) -> None:
        self._vocab_size, self._max_positions, self._cache_tokens = vocab_size, max_positions, cache_tokens
        self._tokenizer, self._defaults, self._clock, self._is_taken = tokenizer, defaults, clock, is_taken
        self._orders, self._names = itertools.count(), itertools.count()

    def prepare(
        self, prompt: Any, params: Params, request_id: str | None = None, arrival_time: float | None = None
    ) -> Request:
        """A request, ready for the queue.

        Raises:
            InvalidRequestError: what is wrong, where, and what to do about it.
        """
        try:
            if request_id is not None and not (isinstance(request_id, str) and request_id):
                raise InvalidRequestError(f"request_id must be a non-empty string, not {request_id!r}")
            sampling = as_params(params).resolve(self._defaults)
            if sampling.stop_strings and self._tokenizer is None:
                raise InvalidRequestError("stop_strings need a tokenizer and the engine has none; use eos_token_id")
            tokens = to_token_ids(prompt, self._tokenizer, self._vocab_size)
            room = self._room(len(tokens), sampling.max_new_tokens if sampling.length_is_explicit else 1)
        except InvalidRequestError as error:
            error.request_id = request_id
            raise
        seed = sampling.seed
        if sampling.do_sample and seed is None:
            seed = int(torch.randint(0, 2**63 - 1, ()))
        sampling = dataclasses.replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room), seed=seed)
        metrics = RequestMetrics(arrival=self._clock() if arrival_time is None else arrival_time)
        name = request_id if request_id is not None else self.new_name()
        return Request.create(name, next(self._orders), tokens, sampling, metrics)

    def new_name(self) -> str:
        """A request id that is not taken."""
        while self._is_taken(name := f"request-{next(self._names)}"):
            pass
        return name

    def _room(self, prompt: int, needed: int) -> int:
        """How many tokens can follow a prompt.

        Raises:
            InvalidRequestError: fewer than needed.
        """
        for limit, whose, more in (
            (self._max_positions, f"the model has {self._max_positions} positions", ""),
            (
                self._cache_tokens,
                f"the cache holds {self._cache_tokens} tokens",
                " or enlarge the cache",
            ),
        ):
            if prompt + needed > limit:
                hint = f"ask for at most {limit - prompt}" if limit > prompt else "shorten the prompt"
                raise InvalidRequestError(
                    f"a prompt of {prompt} tokens with max_new_tokens={needed} does not fit: {whose}; {hint}{more}"
                )
        return min(self._max_positions, self._cache_tokens) - prompt


def as_params(params: Params) -> SamplingParams:
    """Sampling parameters from what a user passed.

    Raises:
        InvalidRequestError: a value is not valid, or it is none of these.
    """
    if params is None:
        return SamplingParams()
    if isinstance(params, Mapping):
        return SamplingParams(**params)
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"sampling_params must be chunkc.SamplingParams, not {type(params).__name__}")
    return params


def one_per_prompt(params: Params | Sequence[Params], count: int) -> Sequence[Params]:
    """Sampling parameters for each of ``count`` prompts.

    Raises:
        InvalidRequestError: a list of another length.
    """
    if params is None or isinstance(params, Mapping) or not isinstance(params, Sequence):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one per prompt")
    return params
