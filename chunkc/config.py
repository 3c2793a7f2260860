"""What a user can set: sampling per request, the engine once. A leaf module; it imports nothing heavy.

Names and meanings are those of ``transformers.GenerationConfig`` wherever it has the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from chunkc.errors import InvalidRequestError

DEFAULT_MAX_NEW_TOKENS = 128
DEFAULT_BUDGET = 512
#: Long runs are read faster than short ones that lie anywhere (a decode step of 8 requests of 1500 tokens takes 21.7 ms
#: with pages of 16 tokens, 18.8 ms with 128); half a page is lost for each request.
DEFAULT_PAGE_SIZE = 128
DEFAULT_MAX_REQUESTS = 256

#: how prefill and decode share the machine; what each means is in ``runtime.multiplex``
Multiplex = Literal["off", "layers", "streams"]
MULTIPLEX: tuple[Multiplex, ...] = get_args(Multiplex)
#: how a graph runs: compiled by Inductor, or op by op, for debugging
MODES = ("compiled", "eager")

# What HuggingFace's generate does where neither the call nor the model's generation_config says anything
# (GenerationConfig._get_default_generation_params); 0 switches min_p off.
_HF_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
_ONLY_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")

# Fields of a generation_config that change what generate returns and that chunkc does not apply, each with
# the values at which it changes nothing.
_NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "no_repeat_ngram_size": (0,),
    "bad_words_ids": (),
    "sequence_bias": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "force_words_ids": (),
    "constraints": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "max_time": (),
    "exponential_decay_length_penalty": (),
    "remove_invalid_values": (False,),
    "guidance_scale": (1, 1.0),
    "watermarking_config": (),
    "token_healing": (False,),
    "typical_p": (1.0,),
    "top_h": (),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "penalty_alpha": (0.0,),
    "dola_layers": (),
}

# What a field of several forms must be; pydantic's own message would name only the first form.
_SHAPES = {
    "eos_token_id": "must be a token id (0 or more) or a list of token ids",
    "stop_strings": "must be a non-empty string or a list of non-empty strings",
}

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}


def parse_memory(size: int | str) -> int:
    """Bytes in a memory size.

    Args:
        size: a number of bytes, or text such as ``"2GiB"``, ``"512MB"``, ``"1.5 GiB"`` or ``"1048576"``.

    Raises:
        ValueError: the text is no size, or the size is not positive.
    """
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        units = {name.lower(): factor for name, factor in _UNITS.items()}
        if match is None or match[2].lower() not in units:
            raise ValueError(f"{size!r} is not a memory size; write for example '2GiB', '512MB' or a number of bytes")
        size = int(float(match[1]) * units[match[2].lower()])
    if isinstance(size, bool) or not isinstance(size, int) or size <= 0:
        raise ValueError(f"a memory size must be a positive number of bytes, not {size!r}")
    return size


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, (list, set, frozenset)) else value


_TokenId = Annotated[int, Field(ge=0)]
_StopString = Annotated[str, Field(min_length=1)]
_EosIds = Annotated[_TokenId | tuple[_TokenId, ...] | None, BeforeValidator(_as_tuple)]
_StopStrings = Annotated[_StopString | tuple[_StopString, ...] | None, BeforeValidator(_as_tuple)]


class SamplingParams(BaseModel):
    """How one request picks its tokens and when it ends. Greedy unless ``do_sample=True``.

    ``None`` means: as the model's generation_config says, else as HuggingFace's generate would (``top_k`` is
    50 then, as there; ``max_new_tokens`` is 128).

    Attributes:
        max_new_tokens: at most this many tokens are generated.
        do_sample: draw from the distribution; otherwise the most likely token is taken.
        temperature: logits are divided by it. Used when sampling, like the next three.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probabilities sum to at least this.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the
            output so far. Used when greedy, too.
        seed: makes the draws of a request reproducible whatever it is batched with. Unset, one is drawn from
            torch's default generator, so that ``torch.manual_seed`` covers it.
        eos_token_id: generation ends after one of these tokens.
        stop_strings: generation ends when the generated text contains one; the text is cut before it.
        ignore_eos: go on to ``max_new_tokens`` whatever tokens come.

    Raises:
        InvalidRequestError: a value is not valid; the message names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_new_tokens: int | None = Field(None, ge=1)
    do_sample: bool = False
    temperature: float | None = Field(None, gt=0, allow_inf_nan=False)
    top_k: int | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    seed: int | None = Field(None, ge=0, lt=2**64)
    eos_token_id: _EosIds = None
    stop_strings: _StopStrings = None
    ignore_eos: bool = False

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise InvalidRequestError("bad sampling parameters: " + _describe(error, SamplingParams)) from error

    def resolve(self, defaults: GenerationDefaults | None = None) -> ResolvedSampling:
        """All values filled in: this object's, else the model's, else HuggingFace's.

        Raises:
            InvalidRequestError: a value that comes from the model's generation_config is not valid.
        """
        model = defaults.values if defaults is not None else {}
        names = ("max_new_tokens", "eos_token_id", "stop_strings", *_HF_DEFAULTS)
        if not self.do_sample:
            names = tuple(name for name in names if name not in _ONLY_WHEN_SAMPLING)
        filled = {name: _first(getattr(self, name), model.get(name), _HF_DEFAULTS.get(name)) for name in names}
        # Values that did not pass through our own constructor are checked here: a generation_config is a file
        # that anyone wrote, and model_copy(update=...) checks nothing.
        checked = SamplingParams(**filled, do_sample=self.do_sample, seed=self.seed, ignore_eos=self.ignore_eos)
        return ResolvedSampling(
            max_new_tokens=checked.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            length_is_explicit=self.max_new_tokens is not None,
            do_sample=checked.do_sample,
            temperature=_first(checked.temperature, 1.0),
            top_k=_first(checked.top_k, 0),
            top_p=_first(checked.top_p, 1.0),
            min_p=_first(checked.min_p, 0.0),
            repetition_penalty=_first(checked.repetition_penalty, 1.0),
            seed=checked.seed,
            eos_token_ids=frozenset() if checked.ignore_eos else frozenset(_listed(checked.eos_token_id)),
            stop_strings=tuple(_listed(checked.stop_strings)),
        )


@dataclass(frozen=True)
class ResolvedSampling:
    """``SamplingParams`` with every value set; fields that do not apply hold the value that changes nothing.

    Attributes:
        length_is_explicit: the caller chose ``max_new_tokens``; a default may be lowered to what fits.
        eos_token_ids: tokens that end the request, empty with ``ignore_eos``.
        seed: None until the engine has drawn one for a request that samples.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    length_is_explicit: bool = True
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()

    @property
    def needs_processing(self) -> bool:
        """Whether the next token is anything but the argmax of the raw logits."""
        return self.do_sample or self.repetition_penalty != 1.0


@dataclass(frozen=True)
class GenerationDefaults:
    """What a model's generation_config contributes.

    Attributes:
        values: the fields that ``SamplingParams`` has too and that the model sets.
        not_applied: the fields that would change outputs and that chunkc does not apply, with their values.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    not_applied: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, generation_config: Any) -> GenerationDefaults:
        """From a ``transformers.GenerationConfig``, a mapping with its names, or None."""
        if generation_config is None:
            return cls()
        if isinstance(generation_config, Mapping):
            get = generation_config.get
        else:

            def get(name: str) -> Any:
                return getattr(generation_config, name, None)

        names = ("max_new_tokens", "eos_token_id", "stop_strings", *_HF_DEFAULTS)
        values = {name: get(name) for name in names if get(name) is not None}
        not_applied = {
            name: get(name)
            for name, neutral in _NOT_APPLIED.items()
            if get(name) is not None and get(name) not in neutral and get(name) not in ([], {}, ())
        }
        return cls(values, not_applied)


class EngineConfig(BaseModel):
    """What an engine is built with.

    Attributes:
        budget: tokens per iteration, decodes and prefill chunks together; None processes each prompt whole.
        max_requests: requests that hold pages at the same time; more wait.
        page_size: tokens per page of the key/value cache.
        num_pages: pages in the cache; excludes ``cache_memory``.
        cache_memory: bytes for the cache, or text such as ``"2GiB"``; excludes ``num_pages``.
        multiplex: how prefill and decode share the machine: ``"off"`` (one batch), ``"layers"`` (in turns, the
            prefill by layers) or ``"streams"`` (at the same time, on cores of their own).
        decode_cores: with ``"streams"``, how many cores decode; the others prefill. None goes by a measurement.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    budget: int | None = Field(DEFAULT_BUDGET, ge=1)
    max_requests: int = Field(DEFAULT_MAX_REQUESTS, ge=1)
    page_size: int = Field(DEFAULT_PAGE_SIZE, ge=1)
    num_pages: int | None = Field(None, ge=1)
    cache_memory: Annotated[int | None, BeforeValidator(lambda v: v if v is None else parse_memory(v))] = None
    multiplex: Multiplex = "off"
    decode_cores: int | None = Field(None, ge=1)

    if not TYPE_CHECKING:  # a type checker sees the fields' own signature

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ValueError("bad engine options: " + _describe(error, type(self))) from error

    @model_validator(mode="after")
    def _one_cache_size(self) -> EngineConfig:
        if self.num_pages is not None and self.cache_memory is not None:
            raise ValueError("num_pages and cache_memory both size the cache; give one of them")
        return self


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _listed(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _describe(error: ValidationError, model: type[BaseModel]) -> str:
    """One clause per bad field: its name, what it must be, what it was."""
    clauses = {}
    for item in error.errors(include_url=False):
        name = str(item["loc"][0]) if item["loc"] else "(all)"
        if item["type"] == "extra_forbidden":
            known = ", ".join(model.model_fields)
            what = "a sampling parameter" if model is SamplingParams else "an option"
            clauses[name] = f"{name} is not {what} (there are: {known})"
            continue
        message = _SHAPES.get(name) or item["msg"][0].lower() + item["msg"][1:]
        if name == "temperature" and item["type"] == "greater_than":
            message += "; for greedy decoding leave do_sample=False"
        message = message.removeprefix("value error, ")
        clauses.setdefault(name, f"{name}={item['input']!r}: {message}" if item["loc"] else message)
    return "; ".join(clauses.values())
