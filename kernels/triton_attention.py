"""The Triton body of ``chunkc::mixed_attention``: its launches.

Three launches on the current stream, none of which waits for the device: ``append_kernel`` writes this step's keys
and values and clears the output, ``attend_kernel`` works through the task table, ``merge_kernel`` (only where the
table has merges) adds up the pieces of blocks that were cut along the keys.

All tensors lie on the device, the task table too. It may be longer than the plan: rows of -1 end it. So a CUDA graph
that was recorded with tables of a given capacity replays any plan that fits them.
"""

from __future__ import annotations

import functools

import torch

from chunkc.kernels import triton_kernels
from chunkc.kernels.triton_config import (
    MAX_CUT_ROWS,
    Device,
    Tiles,
    choose_tiles,
    choose_variant,
    dim_blocks,
    next_power_of_2,
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MERGE_ROWS = 16
_MERGE_BLOCKS_PER_UNIT = 4
_APPEND_HEADS = 8  # heads copied at a time
_CLEAR_BLOCK = 2048  # elements of the output cleared at a time


def mixed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_offsets: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tasks: torch.Tensor,
    merges: torch.Tensor,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    scale: float,
    window: int,
    chunk: int,
    softcap: float,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    *,
    variant: str | None = None,
) -> torch.Tensor:
    """See :func:`chunkc.kernels.reference.mixed_attention`.

    Page ids and slots are trusted. A table may cut blocks of at most ``MAX_CUT_ROWS`` rows along the keys; if scratch
    does not suffice for one that cuts larger blocks, their rows become NaN.

    Args:
        variant: one of ``triton_config.VARIANTS``; None chooses. It changes the speed only.

    Raises:
        TypeError, ValueError: dtypes or shapes that do not fit together.
        NotImplementedError: cos or sin is given; no pass does that but for the C++ body.
    """
    if cos is not None or sin is not None:
        raise NotImplementedError("mixed_attention: the Triton body rotates nothing; q and k must come rotated")
    _check(q, k, v, k_pages, v_pages, q_offsets, kv_lens, page_table, slot_mapping, tasks, merges)
    _check_per_head(q.shape[1], "sink", sinks)
    _check_per_head(q.shape[1], "ALiBi slope", alibi_slopes)
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    num_tokens, num_q_heads, qk_dim = q.shape
    num_kv_heads, v_dim, page_size = k.shape[1], v.shape[2], k_pages.shape[2]
    group = num_q_heads // num_kv_heads
    num_tasks, num_merges = tasks.shape[0], merges.shape[0]
    device = device_of(q.device)
    variant = variant or choose_variant(num_tokens, kv_lens.shape[0], num_merges)
    has_alibi = alibi_slopes is not None
    tiles = choose_tiles(variant, qk_dim, v_dim, q.element_size(), group, device, alibi=has_alibi)

    out = q.new_empty(num_tokens, num_q_heads, v_dim)
    counter = torch.empty(1, dtype=torch.int32, device=q.device)
    grid = min(device.units * tiles.blocks_per_unit, num_tasks)
    triton_kernels.append_kernel[(num_tokens,)](
        k, v, k_pages, v_pages, out, slot_mapping, counter,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3], grid,
        **append_constants(num_kv_heads, num_q_heads, page_size, qk_dim, v_dim),
    )  # fmt: skip
    if num_tasks == 0:
        return out

    scratch_rows = num_tasks * min(MAX_CUT_ROWS, num_tokens * group) if num_merges else 0
    partial_acc = torch.empty(scratch_rows, v_dim, dtype=torch.float32, device=q.device)
    partial_stats = torch.empty(scratch_rows, 2, dtype=torch.float32, device=q.device)
    kv_alike = k_pages.stride() == v_pages.stride()
    sink_tensor = q if sinks is None else sinks  # never read where there are none
    slopes = partial_stats if alibi_slopes is None else alibi_slopes.float()
    triton_kernels.attend_kernel[(grid,)](
        q, k_pages, v_pages, out, partial_acc, partial_stats, counter,
        tasks, q_offsets, kv_lens, page_table, sink_tensor, slopes,
        q.stride(0), q.stride(1), *k_pages.stride()[:3], *v_pages.stride()[:3], out.stride(0), page_table.stride(0),
        scale, softcap, window, chunk, num_tasks, scratch_rows,
        **attend_constants(
            tiles, group, page_size, qk_dim, v_dim, window, chunk, softcap,
            has_sinks=sinks is not None, has_alibi=has_alibi, kv_alike=kv_alike,
        ),
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if num_merges:
        triton_kernels.merge_kernel[(min(device.units * _MERGE_BLOCKS_PER_UNIT, num_merges),)](
            out, partial_acc, partial_stats, merges, q_offsets, sink_tensor, out.stride(0), num_merges, scratch_rows,
            **merge_constants(group, v_dim, sinks is not None),
        )  # fmt: skip
    return out


def attend_constants(
    tiles: Tiles,
    group: int,
    page_size: int,
    qk_dim: int,
    v_dim: int,
    window: int,
    chunk: int,
    softcap: float,
    *,
    has_sinks: bool,
    has_alibi: bool,
    kv_alike: bool,
) -> dict[str, int | bool]:
    """The compile-time arguments of ``attend_kernel``; ``kv_alike``: pages of keys and values have equal strides."""
    qk, vd = dim_blocks(qk_dim), dim_blocks(v_dim)
    return {
        "GROUP": group,
        "PAGE_SIZE": page_size,
        "KV_ALIKE": kv_alike,
        "QK_DIM": qk_dim,
        "QK_MAIN": qk.main,
        "QK_TAIL": qk.tail,
        "V_DIM": v_dim,
        "V_MAIN": vd.main,
        "V_TAIL": vd.tail,
        "HAS_WINDOW": window > 0,
        "HAS_CHUNK": chunk > 0,
        "HAS_SOFTCAP": softcap > 0,
        "HAS_SINKS": has_sinks,
        "HAS_ALIBI": has_alibi,
        "SMALL_M": tiles.small_m,
        "SMALL_N": tiles.small_n,
        "LARGE_M": tiles.large_m,
        "LARGE_N": tiles.large_n,
    }


def append_constants(
    num_kv_heads: int, num_q_heads: int, page_size: int, qk_dim: int, v_dim: int
) -> dict[str, int | bool]:
    """The compile-time arguments of ``append_kernel``."""
    return {
        "HEADS": num_kv_heads,
        "HEADS_BLOCK": min(next_power_of_2(num_kv_heads), _APPEND_HEADS),
        "PAGE_SIZE": page_size,
        "QK_DIM": qk_dim,
        "QK_BLOCK": next_power_of_2(qk_dim),
        "V_DIM": v_dim,
        "V_BLOCK": next_power_of_2(v_dim),
        "OUT_ROW": num_q_heads * v_dim,
        "OUT_BLOCK": min(next_power_of_2(num_q_heads * v_dim), _CLEAR_BLOCK),
    }


def merge_constants(group: int, v_dim: int, has_sinks: bool) -> dict[str, int | bool]:
    """The compile-time arguments of ``merge_kernel``."""
    return {
        "GROUP": group,
        "V_DIM": v_dim,
        "V_BLOCK": next_power_of_2(v_dim),
        "HAS_SINKS": has_sinks,
        "BLOCK_M": min(next_power_of_2(group), _MERGE_ROWS),
    }


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device that tensors lie on. The CPU is Triton's interpreter, as three units that are like sm_90."""
    if device.type == "cpu":
        return Device("interpreter", units=3, shared_memory=227 * 1024)
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device(properties.gcnArchName, properties.multi_processor_count, 64 * 1024, is_hip=True)
    return Device(
        f"sm_{properties.major}{properties.minor}",
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    q_offsets: torch.Tensor,
    kv_lens: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tasks: torch.Tensor,
    merges: torch.Tensor,
) -> None:
    if not (q.dim() == k.dim() == v.dim() == 3 and k_pages.dim() == v_pages.dim() == 4):
        raise ValueError("mixed_attention: q, k, v must be 3-d and the pages 4-d")
    tokens, heads = q.shape[0], k.shape[1]
    if k.shape != (tokens, heads, q.shape[2]) or v.shape[:2] != (tokens, heads) or q.shape[1] % heads:
        raise ValueError(f"mixed_attention: q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
    if (
        k_pages.shape[:3] != v_pages.shape[:3]
        or (k_pages.shape[1], k_pages.shape[3], v_pages.shape[3]) != (heads, k.shape[2], v.shape[2])
        or k_pages.stride(3) != 1
        or v_pages.stride(3) != 1
    ):
        raise ValueError(f"mixed_attention: pages {k_pages.shape} and {v_pages.shape} do not fit {k.shape}, {v.shape}")
    if q.dtype not in _DTYPES:
        raise TypeError(f"mixed_attention: float32, bfloat16 or float16 wanted, not {q.dtype}")
    if any(x.dtype != q.dtype for x in (k, v, k_pages, v_pages)):
        raise TypeError("mixed_attention: q, k, v and the pages must share one dtype")
    for name, table, dtype, dims in (
        ("q_offsets", q_offsets, torch.int32, 1),
        ("kv_lens", kv_lens, torch.int32, 1),
        ("page_table", page_table, torch.int32, 2),
        ("slot_mapping", slot_mapping, torch.int64, 1),
        ("tasks", tasks, torch.int32, 2),
        ("merges", merges, torch.int32, 2),
    ):
        if table.dtype != dtype:
            raise TypeError(f"mixed_attention: {name} must be {dtype}, not {table.dtype}")
        if table.dim() != dims or not table.is_contiguous():
            raise ValueError(f"mixed_attention: {name} must be contiguous and {dims}-d")
        if table.device != q.device:
            raise ValueError(f"mixed_attention: {name} lies on {table.device}, q on {q.device}")
    requests = kv_lens.shape[0]
    if (q_offsets.shape[0], page_table.shape[0], slot_mapping.shape[0]) != (requests + 1, requests, tokens) or (
        tasks.shape[1],
        merges.shape[1],
    ) != (8, 8):
        raise ValueError("mixed_attention: the batch's tensors do not fit together")


def _check_per_head(num_q_heads: int, what: str, numbers: torch.Tensor | None) -> None:
    if numbers is not None and (numbers.shape != (num_q_heads,) or not numbers.is_contiguous()):
        raise ValueError(f"mixed_attention: one {what} per query head wanted, contiguous")
