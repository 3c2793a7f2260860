"""What the Triton kernels take of a device, read off ahead-of-time compilations: no GPU is needed.

``python -m chunkc.kernels.triton_resources`` compiles the table of ``triton_resources.md`` anew and prints it.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from chunkc.kernels import triton_kernels
from chunkc.kernels.triton_attention import append_constants, attend_constants, merge_constants
from chunkc.kernels.triton_config import VARIANTS, Device, Tiles, choose_tiles

DEVICES = {
    "sm_90": Device("sm_90", units=132, shared_memory=232448),
    "sm_80": Device("sm_80", units=108, shared_memory=166912),
    "gfx942": Device("gfx942", units=304, shared_memory=65536, is_hip=True),
}
DIMS = ((64, 64), (128, 128), (256, 256))
GROUP, PAGE_SIZE = 4, 16  # of the committed table

_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_SHARED_PER_UNIT = {"sm_90": 233472, "sm_80": 167936, "gfx942": 65536}
_SHARED_RESERVED = {"sm_90": 1024, "sm_80": 1024, "gfx942": 0}  # per block, by the system
_POINTERS = {
    "partial_acc": "fp32",
    "partial_stats": "fp32",
    "alibi_slopes": "fp32",
    "counter": "i32",
    "tasks": "i32",
    "q_offsets": "i32",
    "kv_lens": "i32",
    "page_table": "i32",
    "merges": "i32",
    "slot_mapping": "i64",
}
# Integers that may be anything.
_UNALIGNED = {"page_table_stride", "window", "chunk", "num_tasks", "num_merges", "scratch_rows", "counter_start"}


@dataclass(frozen=True)
class Resources:
    """One compiled variant.

    Attributes:
        device, variant, qk_dim, v_dim, tiles: what was compiled.
        registers: per thread (of gfx942 vector registers, accumulation registers included).
        shared: bytes of shared memory per block.
        spills: on NVIDIA bytes of local memory per thread, on AMD the number of vector registers that go to memory
            (scalar ones go to lanes of vector registers).
        wgmma, mma: warp-group matrix instructions (HGMMA) and all others (HMMA, MFMA).
        blocks_per_unit: how many blocks a unit can hold at a time.
    """

    device: str
    variant: str
    qk_dim: int
    v_dim: int
    tiles: Tiles
    registers: int
    shared: int
    spills: int
    wgmma: int
    mma: int
    blocks_per_unit: int


def compile_variant(
    device_name: str,
    variant: str,
    qk_dim: int,
    v_dim: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    group: int = GROUP,
    page_size: int = PAGE_SIZE,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
    alibi: bool = False,
    tiles: Tiles | None = None,
) -> Resources:
    """Compile ``attend_kernel`` for a device of DEVICES as a launch with these arguments would, and look at it.

    Raises:
        RuntimeError: the variant takes more shared memory than the device has.
    """
    device = DEVICES[device_name]
    tiles = tiles or choose_tiles(variant, qk_dim, v_dim, dtype.itemsize, group, device, alibi=alibi)
    features = {"has_sinks": sinks, "has_alibi": alibi, "kv_alike": qk_dim == v_dim}
    constants = attend_constants(tiles, group, page_size, qk_dim, v_dim, window, chunk, softcap, **features)
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    compiled = _compile(triton_kernels.attend_kernel, constants, dtype, device, options)
    shared = compiled.metadata.shared
    if shared > device.shared_memory:
        raise RuntimeError(f"{variant} at {qk_dim}/{v_dim} takes {shared} bytes of shared memory on {device_name}")
    if device.is_hip:
        registers, spills, wgmma, mma = _read_amdgcn(compiled.asm["amdgcn"])
        held = 512 // (-(-registers // 8) * 8) * 4 // tiles.warps  # 4 SIMDs, 512 registers a lane each
    else:
        registers, spills, wgmma, mma = _read_cubin(compiled.asm["cubin"])
        held = 65536 // (-(-registers // 8) * 8 * 32 * tiles.warps)
    held = min(held, _SHARED_PER_UNIT[device_name] // (shared + _SHARED_RESERVED[device_name]))
    return Resources(device_name, variant, qk_dim, v_dim, tiles, registers, shared, spills, wgmma, mma, held)


def compile_helpers(device_name: str, qk_dim: int, v_dim: int, *, dtype: torch.dtype = torch.bfloat16) -> None:
    """Compile ``append_kernel`` and ``merge_kernel``, with sinks. Raises what Triton raises."""
    device = DEVICES[device_name]
    heads, group = 8, GROUP
    append = append_constants(heads, heads * group, PAGE_SIZE, qk_dim, v_dim)
    _compile(triton_kernels.append_kernel, append, dtype, device, {})
    _compile(triton_kernels.merge_kernel, merge_constants(group, v_dim, has_sinks=True), dtype, device, {})


def _compile(
    kernel: Any, constants: dict[str, int | bool], dtype: torch.dtype, device: Device, options: dict[str, int]
) -> Any:
    """Compile with the types and alignments that arguments have in practice: all aligned to 16 but for counts."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        if name in ("scale", "softcap"):
            signature[name] = "fp32"
        elif "stride" in name or name in _UNALIGNED:
            signature[name] = "i32"
        else:
            signature[name] = f"*{_POINTERS.get(name, _TYPES[dtype])}"
        if signature[name] != "fp32" and name not in _UNALIGNED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    target = GPUTarget("hip", "gfx942", 64) if device.is_hip else GPUTarget("cuda", int(device.name[3:]), 32)
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


def _read_cubin(cubin: bytes) -> tuple[int, int, int, int]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage, code = (
            subprocess.run([tool, option, file], check=True, capture_output=True, text=True).stdout
            for option in ("-res-usage", "-sass")
        )
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local, len(re.findall(r"\bHGMMA\b", code)), len(re.findall(r"\bHMMA\b", code))


def _read_amdgcn(code: str) -> tuple[int, int, int, int]:
    fact = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", code, re.MULTILINE)}
    return fact["vgpr_count"], fact["vgpr_spill_count"], 0, len(re.findall(r"\bv_mfma_", code))


def describe(tiles: Tiles) -> str:
    """The sizes of tiles as "rows x keys"."""
    sizes = ((tiles.small_m, tiles.small_n), (tiles.large_m, tiles.large_n))
    return ", ".join(f"{rows} x {keys}" for rows, keys in sizes if rows)


def table(resources: Iterable[Resources]) -> str:
    """The resources as a Markdown table."""
    head = (
        "| device | variant | head dim | tiles (rows x keys) | warps | stages | registers | shared KiB | spills "
        "| HGMMA | other MMA | blocks per unit |\n|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    lines = []
    for r in resources:
        t = r.tiles
        dim = f"{r.qk_dim}" if r.qk_dim == r.v_dim else f"{r.qk_dim}/{r.v_dim}"
        lines.append(
            f"| {r.device} | {r.variant} | {dim} | {describe(t)} | {t.warps} | {t.stages} | {r.registers} "
            f"| {r.shared / 1024:.1f} | {r.spills} | {r.wgmma} | {r.mma} | {r.blocks_per_unit} |\n"
        )
    return head + "".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the committed table."""
    argparse.ArgumentParser(
        prog="python -m chunkc.kernels.triton_resources", description="Compile all variants and print what they take."
    ).parse_args(arguments)
    print("# Resources of the Triton attention kernels\n")
    print(f"`attend_kernel` in bfloat16, group {GROUP}, page size {PAGE_SIZE}, by Triton {triton.__version__}.")
    print("Made by `python -m chunkc.kernels.triton_resources`. Blocks per unit is what registers and shared memory")
    print("allow; none of this was measured on a device.\n")
    rows = (compile_variant(d, v, *dims) for d in DEVICES for dims in DIMS for v in VARIANTS)
    print(table(rows), end="")


if __name__ == "__main__":
    main()
