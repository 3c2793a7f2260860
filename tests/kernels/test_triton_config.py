"""The choice of tiles, which needs no Triton."""

from __future__ import annotations

import dataclasses

from chunkc.kernels.triton_config import VARIANTS, Device, choose_tiles, choose_variant, dim_blocks


def test_head_dims_are_split_where_that_is_less() -> None:
    split = {dim: dataclasses.astuple(dim_blocks(dim)) for dim in (8, 16, 24, 40, 64, 80, 96, 112, 160, 192, 256)}
    assert split == {
        8: (16, 0),
        16: (16, 0),
        24: (32, 0),
        40: (32, 16),
        64: (64, 0),
        80: (64, 16),
        96: (64, 32),
        112: (128, 0),
        160: (128, 32),
        192: (128, 64),
        256: (256, 0),
    }


def test_variants_follow_from_shapes() -> None:
    assert choose_variant(num_tokens=8, num_requests=8, num_merges=3) == "decode"
    assert choose_variant(num_tokens=4096, num_requests=2, num_merges=0) == "prefill"
    assert choose_variant(num_tokens=600, num_requests=80, num_merges=4) == "mixed"
    device = Device("sm_90", units=132, shared_memory=232448)
    for variant in VARIANTS:
        tiles = choose_tiles(variant, 64, 64, 2, 4, device)
        assert (tiles.small_m == 0) == (variant == "prefill") and (tiles.large_m == 0) == (variant == "decode")


def test_tiles_fit_shared_memory_at_any_dim() -> None:
    small = Device("sm_120", units=48, shared_memory=101376)
    for variant in VARIANTS:
        for dim in (16, 80, 128, 256, 512):
            for itemsize in (2, 4):
                tiles = choose_tiles(variant, dim, dim, itemsize, 4, small)
                rows, keys = max(tiles.small_m, tiles.large_m), max(tiles.small_n, tiles.large_n)
                needed = (rows + (tiles.stages - 1) * keys * 2) * dim_blocks(dim).total * itemsize
                assert needed * tiles.blocks_per_unit <= small.shared_memory or (keys, tiles.stages) == (16, 1)
