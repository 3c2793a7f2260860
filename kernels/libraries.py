"""The native libraries there are, and what each is built from."""

from __future__ import annotations

from dataclasses import replace

import torch

from chunkc.kernels.native import NativeLibrary


def _per_dtype(library: NativeLibrary, *dtypes: torch.dtype) -> dict[torch.dtype, NativeLibrary]:
    """The library for each dtype. A model has one, and compiling for others would only delay its first start."""
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in dtypes}
    # visibility: what libraries for several dtypes define is each one's own
    return {
        dtype: replace(
            library,
            name=f"{library.name}_{name}",
            flags=(*library.flags, "-fvisibility=hidden", f"-DCHUNKC_{name.upper()}"),
        )
        for dtype, name in names.items()
    }


_ATTENTION_HEADERS = ("cpu_call.h", "cpu_parallel.h", "cpu_products.h", "cpu_elements.h", "cpu_simd.h")
_TENSOR_HEADERS = ("cpu_tensor.h", "cpu_check.h")
_ATTENTION_FLAGS = ("-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp")

_ATTENTION = NativeLibrary(
    "cpu_attention",
    (
        "cpu_attention.cpp",
        "cpu_dtype.h",
        "cpu_operator.h",
        "cpu_table.h",
        "cpu_task.h",
        "cpu_decode.h",
        "cpu_decode_products.h",
        "cpu_decode_tiles.h",
        "cpu_prefill.h",
        "cpu_pairs.h",
        "cpu_rotary.h",
        *_ATTENTION_HEADERS,
        *_TENSOR_HEADERS,
    ),
    flags=_ATTENTION_FLAGS,
    torch=True,
)
#: the C++ body of ``chunkc::mixed_attention``, for each dtype
ATTENTION = _per_dtype(_ATTENTION, torch.float32, torch.bfloat16, torch.float16)
#: what the machine can do, for the benchmark
RATES = NativeLibrary(
    "cpu_rates", ("cpu_rates.cpp", *_ATTENTION_HEADERS, *_TENSOR_HEADERS), flags=_ATTENTION_FLAGS, torch=True
)
_LINEAR = NativeLibrary(
    "cpu_linear",
    (
        "cpu_linear.cpp",
        "cpu_dtype.h",
        "cpu_linear_onednn.h",
        "cpu_linear_memory.h",
        "cpu_linear_registry.h",
        "cpu_linear_product.h",
        "cpu_linear_layout.h",
        "cpu_linear_best.h",
        "cpu_linear_epilogue.h",
        "cpu_linear_norm.h",
        "cpu_linear_tile.h",
        "cpu_operator.h",
        "cpu_parallel.h",
        "cpu_simd.h",
        *_TENSOR_HEADERS,
    ),
    flags=("-march=native", "-fopenmp"),
    torch=True,
)
#: packed linears, for each dtype that is worth packing
LINEAR = _per_dtype(_LINEAR, torch.float32, torch.bfloat16)
#: packed linears that no kernel of ours serves
ONEDNN = NativeLibrary(
    "cpu_linear_onednn",
    (
        "cpu_linear_onednn.cpp",
        "cpu_linear_onednn.h",
        "cpu_linear_plain.h",
        "cpu_linear_epilogue.h",
        "cpu_linear_layout.h",
        "cpu_linear_tile.h",
        "cpu_parallel.h",
        "cpu_simd.h",
        *_TENSOR_HEADERS,
    ),
    torch=True,
)
#: the plan of a step
PLANNER = NativeLibrary("planner", ("planner.cpp", "planner_schedule.h"))
