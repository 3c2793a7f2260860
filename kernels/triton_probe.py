"""Which SMs of a GPU the current stream's kernels run on. It has not run on a GPU yet."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import smid

_BLOCKS_PER_SM = 32
_ROUNDS = 2000  # so many dependent steps keep a block busy until others have found their places


@triton.jit
def note_sm_kernel(found, rounds: tl.constexpr):
    """int32 ``found [grid]``: the SM that each block ran on."""
    value = tl.program_id(0)
    for _ in range(rounds):
        value = value * 1664525 + 1013904223
    # The sum is kept so that the work is, too; it is never that number of an SM.
    tl.store(found + tl.program_id(0), tl.where(value == -1, -1, smid()))


def sms_in_use(device: torch.device) -> set[int]:
    """Numbers of the SMs that blocks of a launch on the current stream were given to; waits for it."""
    blocks = _BLOCKS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    found = torch.empty(blocks, dtype=torch.int32, device=device)
    note_sm_kernel[(blocks,)](found, rounds=_ROUNDS)
    return set(found.tolist())
