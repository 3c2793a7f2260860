"""Checks the Triton body on a GPU against float64, then times it: ``python -m chunkc.kernels.gpu_check``.

Times are medians over replays of a CUDA graph, so they hold no launch overhead; beside each stands what the device
could do at best, from a copy and a matrix product measured in the same run. A mixed batch is compared with its prefills
and its decodes as two launches one after the other, a prefill with torch's own attention.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from chunkc.kernels import triton_attention
from chunkc.kernels.cases import MixedCase, make_case, tolerance
from chunkc.kernels.tasks import AttentionShape
from chunkc.kernels.triton_config import VARIANTS, plan_step


@dataclass(frozen=True)
class Check:
    """One case: arguments of ``make_case``, of its plan, and the variant (None = the default choice)."""

    name: str
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    shape: AttentionShape
    case: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    variant: str | None = None


_MIXED = ((3, 1, 40, 0, 1), (40, 300, 100, 9, 1))  # q_lens and kv_lens of most checks
_BF16 = {"dtype": torch.bfloat16}
_ALIBI = {**_BF16, "alibi": True}
CHECKS = (
    *(Check(f"variant {v}", *_MIXED, AttentionShape(8, 2, 128, 128), _BF16, variant=v) for v in VARIANTS),
    *(Check(f"group {g}", *_MIXED, AttentionShape(g, 1, 64, 64), _BF16) for g in (1, 3, 5, 6, 7, 16, 20)),
    *(Check(f"dim {d}", *_MIXED, AttentionShape(4, 2, d, d), _BF16) for d in (16, 24, 40, 80, 96, 112, 160, 256)),
    *(Check(f"dims {a}/{b}", *_MIXED, AttentionShape(2, 2, a, b), _BF16) for a, b in ((192, 128), (96, 64), (24, 16))),
    *(Check(f"page size {p}", *_MIXED, AttentionShape(4, 2, 64, 64), {**_BF16, "page_size": p}) for p in (1, 48, 512)),
    Check("float32", *_MIXED, AttentionShape(4, 2, 64, 64)),
    Check("float16", *_MIXED, AttentionShape(4, 2, 64, 64), {"dtype": torch.float16}),
    Check("window", *_MIXED, AttentionShape(4, 2, 64, 64, window=33), {**_BF16, "page_size": 4}),
    Check("chunk", *_MIXED, AttentionShape(4, 2, 64, 64, chunk=32), {**_BF16, "page_size": 4}),
    Check("softcap", *_MIXED, AttentionShape(4, 2, 64, 64), {**_BF16, "softcap": 5.0, "score_std": 1e4}),
    Check("sinks and splits", *_MIXED, AttentionShape(4, 2, 64, 64), {**_BF16, "sinks": True}, {"kv_split": 64}),
    *(Check(f"ALiBi, variant {v}", *_MIXED, AttentionShape(6, 2, 64, 64), _ALIBI, variant=v) for v in VARIANTS),
)


def dense(case: MixedCase, magnitude: bool = False) -> torch.Tensor:
    """The exact result of a case in float64 ``[T, Hq, Dv]``; with ``magnitude`` that of the values' magnitudes."""
    out = torch.zeros(*case.q.shape[:2], case.shape.v_dim, dtype=torch.float64)
    offsets, shape = case.metadata.q_offsets.tolist(), case.shape
    for r, (keys, values) in enumerate(zip(case.keys, case.values, strict=True)):
        q = case.q[offsets[r] : offsets[r + 1]].double().transpose(0, 1)
        k, v = (x.double().transpose(0, 1).repeat_interleave(shape.group, 0) for x in (keys, values))
        scores = q @ k.transpose(1, 2) * case.scale
        if case.softcap:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        key = torch.arange(k.shape[1])[None, :]
        position = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
        if case.alibi_slopes is not None:
            scores += case.alibi_slopes.double()[:, None, None] * (key - position)
        hidden = key > position
        if shape.window:
            hidden |= position - key >= shape.window
        if shape.chunk:
            hidden |= position // shape.chunk != key // shape.chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if case.sinks is not None:
            scores = torch.cat([scores, case.sinks.double()[:, None, None].expand(-1, q.shape[1], 1)], 2)
        weights = torch.softmax(scores, 2)[:, :, : k.shape[1]]
        out[offsets[r] : offsets[r + 1]] = (weights @ (v.abs() if magnitude else v)).transpose(0, 1)
    return out


def excess(check: Check, device: torch.device) -> float:
    """The largest error of a check as a fraction of what roundings explain; above 1 something is wrong.

    Explained are float32 sums, the rounding of the result, and that of the weights to the dtype of the values. A
    second run must give the same bits, or the excess is infinite.
    """
    case = make_case(check.q_lens, check.kv_lens, check.shape, **check.case)
    arguments = [
        x.to(device) if isinstance(x, torch.Tensor) else x for x in case.arguments(case.plan(units=8, **check.plan))
    ]
    got, again = (triton_attention.mixed_attention(*arguments, variant=check.variant) for _ in range(2))
    if not torch.equal(got, again):
        return float("inf")
    want, allowed = dense(case), tolerance(case.q.dtype)
    bound = allowed["atol"] + allowed["rtol"] * want.abs()
    if case.q.dtype != torch.float32:
        bound += torch.finfo(case.q.dtype).eps * dense(case, magnitude=True)
    worst = ((got.cpu().double() - want).abs() / bound).max().item()
    return worst if worst == worst else float("inf")  # NaN


@dataclass(frozen=True)
class Batch:
    """A batch on a device in bfloat16, with random tokens, pages in random order and its plan.

    Attributes:
        arguments: of the operator.
        kv_bytes: of the keys and values that it attends to.
        flops: of its two products.
    """

    arguments: tuple
    kv_bytes: int
    flops: int

    def run(self) -> torch.Tensor:
        """The operator's result."""
        return triton_attention.mixed_attention(*self.arguments)


def make_batch(
    q_lens: Sequence[int], kv_lens: Sequence[int], shape: AttentionShape, device: torch.device, page_size: int = 16
) -> Batch:
    """A batch of requests with so many new tokens and so many cached ones, including these."""
    tokens, heads = sum(q_lens), shape.num_kv_heads
    pages = [-(-n // page_size) for n in kv_lens]
    order = torch.randperm(sum(pages)).int()
    page_table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    slots = []
    for r, (own, q_len, kv_len) in enumerate(zip(order.split(pages), q_lens, kv_lens, strict=True)):
        page_table[r, : len(own)] = own
        position = torch.arange(kv_len - q_len, kv_len)
        slots.append(own[position // page_size].long() * page_size + position % page_size)
    q_offsets = torch.tensor([0, *q_lens]).cumsum(0).int()
    lengths = torch.tensor(kv_lens, dtype=torch.int32)
    plan = plan_step(
        q_offsets, lengths, shape, page_size=page_size, itemsize=2, device=triton_attention.device_of(device)
    )

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16)

    return Batch(
        (
            normal(tokens, shape.num_q_heads, shape.qk_dim),
            normal(tokens, heads, shape.qk_dim),
            normal(tokens, heads, shape.v_dim),
            normal(sum(pages), heads, page_size, shape.qk_dim),
            normal(sum(pages), heads, page_size, shape.v_dim),
            *(x.to(device) for x in (q_offsets, lengths, page_table, torch.cat(slots), plan.tasks, plan.merges)),
            *(None, None, shape.qk_dim**-0.5, 0, 0, 0.0),
        ),
        kv_bytes=sum(kv_lens) * heads * (shape.qk_dim + shape.v_dim) * 2,
        flops=sum(q * kv - q * (q - 1) // 2 for q, kv in zip(q_lens, kv_lens, strict=True))
        * shape.num_q_heads
        * (shape.qk_dim + shape.v_dim)
        * 2,
    )


def median_ms(function: Callable[[], Any]) -> float:
    """Median time of a replay of the function's launches as a CUDA graph, in milliseconds."""
    from triton.testing import do_bench

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and warms the allocator up
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return do_bench(graph.replay, return_mode="median")


def copy_bandwidth(device: torch.device) -> float:
    """GB/s, read and written, of copying 2 GiB."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_ms(lambda: target.copy_(source)) / 1e6


def matrix_rate(device: torch.device) -> float:
    """TFLOP/s of a square matrix product in bfloat16."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=device)
    return 2 * 8192**3 / median_ms(lambda: a @ a) / 1e9


def time_all(device: torch.device) -> dict[str, float]:
    """Milliseconds, GB/s and TFLOP/s by name, printed as they come."""
    results: dict[str, float] = {}

    def note(name: str, value: float, unit: str) -> None:
        results[f"{name} [{unit}]"] = value
        print(f"{name:58} {value:10.3f} {unit}", flush=True)

    bandwidth, rate = copy_bandwidth(device), matrix_rate(device)
    note("copy", bandwidth, "GB/s")
    note("matrix product of 8192", rate, "TFLOP/s")

    shape = AttentionShape(32, 8, 128, 128)
    for prefills in (1, 2):
        parts = ([2048] * prefills, [2048] * prefills), ([1] * 128, [2048] * 128)
        mixed = make_batch(parts[0][0] + parts[1][0], parts[0][1] + parts[1][1], shape, device)
        name = f"{prefills} x 2048 prefill + 128 decodes at 2048"
        together = median_ms(mixed.run)
        serial = [make_batch(*part, shape, device) for part in parts]
        apart = median_ms(lambda batches=serial: [batch.run() for batch in batches])
        note(name, together, "ms")
        note(f"{name}, floor by bandwidth", mixed.kv_bytes / bandwidth / 1e6, "ms")
        note(f"{name}, two launches", apart, "ms")
        note(f"{name}, two launches / one", apart / together, "x")

    decode = make_batch([1] * 32, [4096] * 32, shape, device)
    took = median_ms(decode.run)
    note("32 decodes at 4096", took, "ms")
    note("32 decodes at 4096, of copy bandwidth", 100 * decode.kv_bytes / took / 1e6 / bandwidth, "%")

    prefill = make_batch([16384], [16384], shape, device)
    took = median_ms(prefill.run)
    note("16384 prefill", prefill.flops / took / 1e9, "TFLOP/s")
    q, k, v = (x.transpose(0, 1)[None] for x in prefill.arguments[:3])
    sdpa = torch.nn.functional.scaled_dot_product_attention
    took = median_ms(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))
    note("16384 prefill by torch's attention, not paged", prefill.flops / took / 1e9, "TFLOP/s")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if a check fails."""
    parser = argparse.ArgumentParser(prog="python -m chunkc.kernels.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, help="write the times to this JSON file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA or ROCm device, and torch finds none.", file=sys.stderr)
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    print(triton_attention.device_of(device))
    failed = 0
    for check in CHECKS:
        worst = excess(check, device)
        failed += worst > 1
        print(f"{check.name:58} {worst:10.3f} of the error that roundings explain{' FAILED' * (worst > 1)}", flush=True)
    results = time_all(device)
    if options.output:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(f"{failed} of {len(CHECKS)} checks failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
