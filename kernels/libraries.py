"""The native libraries there are, and what each is built from."""

from __future__ import annotations

from chunkc.kernels.native import NativeLibrary

_ATTENTION_HEADERS = ("cpu_call.h", "cpu_parallel.h", "cpu_products.h", "cpu_elements.h", "cpu_simd.h")
_ATTENTION_FLAGS = ("-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp")

#: the C++ body of ``chunkc::mixed_attention``
ATTENTION = NativeLibrary(
    "cpu_attention",
    (
        "cpu_attention.cpp",
        "cpu_operator.h",
        "cpu_table.h",
        "cpu_task.h",
        "cpu_decode.h",
        "cpu_decode_products.h",
        "cpu_decode_tiles.h",
        "cpu_prefill.h",
        "cpu_pairs.h",
        *_ATTENTION_HEADERS,
    ),
    flags=_ATTENTION_FLAGS,
    torch=True,
)
#: what the machine can do, for the benchmark
RATES = NativeLibrary("cpu_rates", ("cpu_rates.cpp", *_ATTENTION_HEADERS), flags=_ATTENTION_FLAGS, torch=True)
#: packed linears
LINEAR = NativeLibrary(
    "cpu_linear",
    (
        "cpu_linear.cpp",
        "cpu_linear_onednn.h",
        "cpu_linear_memory.h",
        "cpu_linear_registry.h",
        "cpu_linear_product.h",
        "cpu_linear_layout.h",
        "cpu_linear_best.h",
        "cpu_linear_epilogue.h",
        "cpu_linear_norm.h",
        "cpu_linear_plain.h",
        "cpu_linear_tile.h",
        "cpu_operator.h",
        "cpu_parallel.h",
        "cpu_simd.h",
    ),
    flags=("-march=native", "-fopenmp"),
    torch=True,
)
#: packed linears that no kernel of ours serves
ONEDNN = NativeLibrary("cpu_linear_onednn", ("cpu_linear_onednn.cpp", "cpu_linear_onednn.h"), torch=True)
#: the plan of a step
PLANNER = NativeLibrary("planner", ("planner.cpp", "planner_schedule.h"))
