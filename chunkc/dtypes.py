"""A torch dtype in data that pydantic reads and writes. A leaf module."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import PlainSerializer, PlainValidator


def _read(found: Any) -> torch.dtype:
    dtype = found if isinstance(found, torch.dtype) else getattr(torch, str(found), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{found!r} is not the name of a torch dtype")
    return dtype


def _write(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


#: written as "float32"
TorchDtype = Annotated[torch.dtype, PlainValidator(_read), PlainSerializer(_write)]
