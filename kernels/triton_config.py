"""Tile sizes of the Triton body, chosen on the host from dims, dtype, group and device, and plans that fit them.

Nothing here imports Triton.

They are the largest that compile without spilling registers at head dims up to 128 in 16 bits: ``triton_resources.md``
has what each takes, and a test holds it there. None of it was measured on a device yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from chunkc.kernels.device import DeviceModel
from chunkc.kernels.tasks import AttentionShape, TaskTable, plan_tasks

VARIANTS = ("decode", "prefill", "mixed")

MAX_CUT_ROWS = 64
"""Most rows in a block that is cut along the keys. Scratch for partial results is sized by it, as the table lies on
the device and the host cannot look into it."""


@dataclass(frozen=True)
class Device:
    """What the choice of tiles depends on.

    Attributes:
        name: architecture, as in "sm_90".
        units: SMs or CUs.
        shared_memory: bytes of shared memory that one block can have.
        is_hip: AMD.
    """

    name: str
    units: int
    shared_memory: int
    is_hip: bool = False

    @property
    def has_wgmma(self) -> bool:
        """Whether its matrix instructions read shared memory, which leaves registers free."""
        return self.name in ("sm_90", "sm_100", "sm_103")


@dataclass(frozen=True)
class DimBlocks:
    """A head dim as a main block and a tail (0 = none), each a power of two of at least 16."""

    main: int
    tail: int

    @property
    def total(self) -> int:
        """Elements that are loaded and multiplied."""
        return self.main + self.tail


@dataclass(frozen=True)
class Tiles:
    """Constants of one compiled variant.

    Attributes:
        small_m, small_n: rows and keys of the tile for tasks of few rows (decodes); 0, 0 = the variant has none.
        large_m, large_n: the same for all other tasks.
        warps, stages: as Triton means them.
        blocks_per_unit: programs that a unit holds at a time; the grid is this many times the number of units.
    """

    small_m: int
    small_n: int
    large_m: int
    large_n: int
    warps: int
    stages: int
    blocks_per_unit: int


def dim_blocks(dim: int) -> DimBlocks:
    """Split a head dim where that multiplies less than padding it: 80 = 64 + 16, 160 = 128 + 32, but 112 -> 128."""
    padded = max(next_power_of_2(dim), 16)
    main = padded // 2
    if main >= 16 and main < dim:
        tail = max(next_power_of_2(dim - main), 16)
        if main + tail < padded:
            return DimBlocks(main, tail)
    return DimBlocks(padded, 0)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def choose_variant(num_tokens: int, num_requests: int, num_merges: int) -> str:
    """A guess from the shapes alone, as a launch must not wait for the device to say what is in the table.

    One token a request can only be decodes, or a batch so small that it does not matter. Decodes among prefill are
    what gets cut along the keys in practice. A wrong guess costs time, nothing else.
    """
    if num_tokens <= num_requests:
        return "decode"
    return "prefill" if num_merges == 0 and num_tokens >= 64 * num_requests else "mixed"


def choose_tiles(
    variant: str, qk_dim: int, v_dim: int, itemsize: int, group: int, device: Device, *, alibi: bool = False
) -> Tiles:
    """Tiles of a variant.

    Args:
        variant: one of VARIANTS.
        qk_dim, v_dim: head dims.
        itemsize: bytes of an element of q, k and v.
        group: query heads per key/value head.
        device: what it runs on.
        alibi: with a bias by distance, which takes registers of its own.
    """
    qk, vd = dim_blocks(qk_dim).total, dim_blocks(v_dim).total
    width = max(qk, vd) * itemsize  # bytes of a row
    small_m = min(max(next_power_of_2(group), 16), 64)
    if variant == "decode":
        # Bound by bandwidth: small tiles, of which many are in flight.
        large_m, keys, warps, stages = 0, (32 if width <= 256 else 16), 4, 4
    elif variant == "prefill":
        # Bound by arithmetic: all registers of a unit for one block, or 16 rows for each of 8 warps.
        large_m, keys, warps, stages = (128, 64, 8, 3) if width <= 256 else (64, 32, 8, 3)
        if not device.has_wgmma and 128 < width <= 256:
            keys, stages = 32, 2
    else:
        large_m, keys, warps, stages = 64, (64 if width <= 128 and not device.is_hip else 32), 4, 3
        if width > (256 if device.has_wgmma else 128):
            warps = 8
    if alibi and variant == ("mixed" if device.is_hip else "prefill") and 128 < width <= 256:
        keys //= 2  # these have no register to spare
    if device.is_hip:
        stages = min(stages, 2)

    def shared(keys: int, stages: int) -> int:
        """Bytes that a block takes: its queries, and the keys and values in use or in flight."""
        return max(large_m, small_m) * qk * itemsize + (stages - 1) * keys * (qk + vd) * itemsize

    while keys > 16 and shared(keys, stages) > device.shared_memory:
        keys //= 2
    while stages > 1 and shared(keys, stages) > device.shared_memory:
        stages -= 1
    # As many as registers allow, as compiled; then as shared memory allows.
    blocks_per_unit = 1 if warps == 8 else 3 if variant == "decode" and width <= 128 else 2
    while blocks_per_unit > 1 and blocks_per_unit * shared(keys, stages) > device.shared_memory:
        blocks_per_unit -= 1
    return Tiles(
        small_m=0 if variant == "prefill" else small_m,
        small_n=0 if variant == "prefill" else keys,
        large_m=large_m,
        large_n=keys if large_m else 0,
        warps=warps,
        stages=stages,
        blocks_per_unit=blocks_per_unit,
    )


def plan_step(
    q_offsets: torch.Tensor,
    kv_lens: torch.Tensor,
    shape: AttentionShape,
    *,
    page_size: int,
    itemsize: int,
    device: Device,
    model: DeviceModel | None = None,
) -> TaskTable:
    """The plan of one step (on the CPU) with blocks of the size of the tiles that a launch will choose.

    Args:
        q_offsets, kv_lens, shape, page_size: see :func:`chunkc.kernels.tasks.plan_tasks`.
        itemsize: bytes of an element of q, k and v.
        device: what it will run on.
        model: what that can do; None weighs costs as a CPU's.
    """

    def plan(variant: str) -> TaskTable:
        tiles = choose_tiles(variant, shape.qk_dim, shape.v_dim, itemsize, shape.group, device)
        units = device.units * tiles.blocks_per_unit
        q_block = tiles.large_m or None
        return plan_tasks(q_offsets, kv_lens, shape, page_size=page_size, units=units, q_block=q_block, device=model)

    variant = choose_variant(int(q_offsets[-1]), kv_lens.shape[0], 0)
    table = plan(variant)
    if variant == "prefill" and len(table.merges):
        table = plan("mixed")  # which such a launch will be, with blocks that scratch suffices for
    return table
