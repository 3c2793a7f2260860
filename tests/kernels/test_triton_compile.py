"""The Triton kernels compiled ahead of time: no GPU is needed to see registers, spills and instructions."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from chunkc.kernels import triton_resources
from chunkc.kernels.triton_config import VARIANTS, choose_tiles
from chunkc.kernels.triton_resources import DEVICES, DIMS, Resources, compile_helpers, compile_variant

TABLE = Path(triton_resources.__file__).with_name("triton_resources.md")
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile, rather than find what an earlier run compiled."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))


def check(resources: Resources) -> None:
    if resources.qk_dim <= 128:
        # Other versions of the assembler may keep a few scalars in memory ahead of the loops.
        same_triton = f"Triton {triton_resources.triton.__version__}." in TABLE.read_text()
        assert resources.spills <= (0 if same_triton else 64), resources
    assert resources.mma + resources.wgmma > 0
    if resources.device == "sm_90" and resources.variant != "decode":
        assert resources.wgmma > 0, "prefill tiles must use warp-group matrix instructions"
    assert resources.blocks_per_unit >= resources.tiles.blocks_per_unit, "the grid assumes that they fit"


@pytest.mark.parametrize(
    ("device", "variant", "dim"),
    [("sm_90", "mixed", 128), ("sm_90", "decode", 64), ("sm_80", "prefill", 128), ("gfx942", "prefill", 64)],
)
def test_no_spills_and_the_right_matrix_instructions(device: str, variant: str, dim: int) -> None:
    check(compile_variant(device, variant, dim, dim))


@pytest.mark.parametrize("device", DEVICES)
def test_appending_and_merging_compile(device: str) -> None:
    compile_helpers(device, 80, 96)


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_variant(device: str, variant: str, dims: tuple[int, int]) -> None:
    check(compile_variant(device, variant, *dims))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [64, 128])
def test_alibi_does_not_spill(device: str, variant: str, dim: int) -> None:
    check(compile_variant(device, variant, dim, dim, alibi=True))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options",
    [
        {"window": 128, "softcap": 30.0, "sinks": True, "group": 5},
        {"chunk": 8192, "page_size": 1},
        {"alibi": True},
        {"alibi": True, "window": 128, "softcap": 30.0, "sinks": True, "qk_dim": 128, "v_dim": 128},
        {"qk_dim": 80, "v_dim": 80, "page_size": 48},
        {"qk_dim": 192, "v_dim": 128, "group": 1},
        {"qk_dim": 24, "v_dim": 16, "dtype": torch.float16},
        {"dtype": torch.float32, "group": 3},
        {"group": 71},
    ],
    ids=str,
)
def test_every_feature_compiles(device: str, options: dict) -> None:
    for variant in ("decode", "mixed"):
        resources = compile_variant(device, variant, **{"qk_dim": 64, "v_dim": 64, **options})
        assert resources.blocks_per_unit >= 1


def test_the_committed_table_is_of_the_tiles_in_use() -> None:
    """Columns that are chosen rather than compiled; what was compiled depends on the version of Triton."""
    text = TABLE.read_text()
    for name, device in DEVICES.items():
        for variant in VARIANTS:
            for qk_dim, v_dim in DIMS:
                tiles = choose_tiles(variant, qk_dim, v_dim, 2, triton_resources.GROUP, device)
                row = re.search(rf"^\| {name} \| {variant} \| {qk_dim} \| ([^|]+) \| (\d+) \| (\d+) \|", text, re.M)
                assert row is not None
                assert row[1] == triton_resources.describe(tiles)
                assert (int(row[2]), int(row[3])) == (tiles.warps, tiles.stages)


def test_resources_are_read_off_the_binary(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that is too large for the registers shows as spills, one too large for shared memory is refused."""
    tiles = choose_tiles("prefill", 128, 128, 2, 4, DEVICES["sm_90"])
    large = compile_variant("sm_90", "prefill", 128, 128, tiles=dataclasses.replace(tiles, large_m=128, warps=4))
    assert large.spills > 0 and large.registers == 255
    monkeypatch.setitem(DEVICES, "sm_90", dataclasses.replace(DEVICES["sm_90"], shared_memory=1024))
    with pytest.raises(RuntimeError, match="shared memory"):
        compile_variant("sm_90", "decode", 64, 64, tiles=tiles)
