"""chunkc: serve unmodified HuggingFace causal LMs with chunked prefill.

Public names are resolved on first use, so ``import chunkc`` imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# In a clone, passes/, runtime/ and kernels/ lie beside this folder, not in it. Someone who installed a wheel and
# starts Python in the clone gets this folder, and must find the others as well.
if not (Path(__file__).parent / "passes").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

_PUBLIC = {
    "compile": "chunkc.compiler",
    "rewrite": "chunkc.rewriting",
    "Engine": "chunkc.runtime.engine",
    "SamplingParams": "chunkc.config",
    "Completion": "chunkc.runtime.outputs",
    "TokenEvent": "chunkc.runtime.outputs",
    "ChunkcError": "chunkc.errors",
    "UnsupportedModelError": "chunkc.errors",
    "InvalidRequestError": "chunkc.errors",
    "CapacityError": "chunkc.errors",
    "PassError": "chunkc.errors",
    "VerificationError": "chunkc.errors",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        value = getattr(importlib.import_module(_PUBLIC[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'chunkc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])


if TYPE_CHECKING:
    from chunkc.compiler import compile
    from chunkc.config import SamplingParams
    from chunkc.errors import CapacityError, ChunkcError, InvalidRequestError, UnsupportedModelError
    from chunkc.rewriting import rewrite
    from chunkc.runtime.engine import Engine
    from chunkc.runtime.outputs import Completion, TokenEvent
