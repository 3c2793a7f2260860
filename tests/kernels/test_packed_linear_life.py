"""How long packed weights live, who may use them at once, and what serves where nothing can be built."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

from chunkc.kernels.packed_linear import PackedWeight, can_pack

needs_packing = pytest.mark.skipif(not can_pack(torch.float32), reason="this torch has no oneDNN")
packed_linear = torch.ops.chunkc.packed_linear

WITHOUT_COMPILER = """
import gc, torch
from chunkc.kernels import packed_linear
from chunkc.kernels.packed_linear import PackedWeight, can_pack
assert packed_linear.load(torch.float32) is None and can_pack(torch.float32)
x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
packed, other = PackedWeight(weight), PackedWeight(weight)
handle = packed.handle
torch.testing.assert_close(torch.ops.chunkc.packed_linear(x, handle, bias, 4), x @ weight.T + bias)
del packed
gc.collect()
try:
    torch.ops.chunkc.packed_linear(x, handle, bias, 4)
except RuntimeError as error:
    print(error)
"""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_packing
@pytest.mark.parametrize("own", [True, False], ids=["own", "onednn"])
def test_a_weight_that_is_gone_is_an_error_and_not_another_weight(own):
    packed = PackedWeight(torch.randn(4, 3), own=own)
    handle, alive = packed.handle.clone(), weakref.ref(packed)
    del packed
    gc.collect()
    assert alive() is None
    other = PackedWeight(torch.randn(4, 3), own=own)
    with pytest.raises(RuntimeError, match="is gone; keep its PackedWeight"):
        packed_linear(torch.randn(2, 3), handle, None, 4)
    packed_linear(torch.randn(2, 3), other.handle, None, 4)


@needs_packing
@pytest.mark.parametrize("count, rows", [(1, 60_000), (20, 3000)], ids=["a large one", "small ones in one block"])
def test_memory_goes_with_the_object(count, rows):
    weight = torch.ones(rows, 256)
    size = count * weight.nbytes
    kept = PackedWeight(weight[:10])  # its neighbours' memory goes all the same
    before = resident_bytes()
    packed = [PackedWeight(weight) for _ in range(count)]
    assert resident_bytes() - before > 0.8 * size
    del packed
    assert resident_bytes() - before < 0.2 * size
    assert (packed_linear(torch.ones(2, 256), kept.handle, None, 10) == 256).all()


@needs_packing
def test_threads_use_pack_and_free_at_once():
    torch.set_num_threads(2)
    shared_weight = torch.randn(130, 65)
    shared = PackedWeight(shared_weight)
    errors = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            for i in range(60):
                weight, x = torch.randn(70, 65, generator=generator), torch.randn(1 + i, 65, generator=generator)
                mine = PackedWeight(weight, own=i % 7 != 0)
                torch.testing.assert_close(packed_linear(x, mine.handle, None, 70), x @ weight.T)
                torch.testing.assert_close(packed_linear(x, shared.handle, None, 130), x @ shared_weight.T)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@needs_packing
def test_a_weight_that_is_freed_while_it_is_used_is_whole_until_then():
    x, weight = torch.ones(64, 512), torch.ones(512, 512)
    for _ in range(30):
        packed = PackedWeight(weight)
        handle, seen = packed.handle, []

        def use(handle: torch.Tensor = handle, seen: list[torch.Tensor] = seen) -> None:
            try:
                while True:
                    seen.append(packed_linear(x, handle, None, 512))
            except RuntimeError as error:
                assert "is gone" in str(error)

        thread = threading.Thread(target=use)
        thread.start()
        while not seen:
            pass
        del packed
        thread.join()
        assert all((result == 512).all() for result in seen)


@needs_packing
def test_without_a_compiler_onednn_serves_and_nobody_is_warned(tmp_path: Path) -> None:
    environment = {**os.environ, "CHUNKC_CACHE_DIR": str(tmp_path), "CXX": "no-such-compiler"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", WITHOUT_COMPILER]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the packed weight 0 is gone; keep its PackedWeight as long as the graph runs\n"
    assert not list(tmp_path.iterdir())
