"""Random numbers that depend on nothing but their name.

A request's n-th draw is a function of (seed, n) alone: the same whatever the request is batched with, however
its prompt was cut, and after a preemption. The function is Philox4x32-10 (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), here on NumPy arrays.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox4x32(counter: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The Philox4x32-10 block function.

    Args:
        counter: uint64 ``[4, n]`` holding 32-bit words.
        key: uint64 ``[2, n]`` holding 32-bit words.

    Returns:
        uint64 ``[4, n]`` holding 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ k0,
            second & _LOW,
            (first >> _HALF) ^ c3 ^ k1,
            first & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return np.stack([c0, c1, c2, c3])


def uniforms(seeds: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """One number in [0, 1) with 53 random bits for each (seed, index).

    Args:
        seeds: uint64 ``[n]``.
        indices: uint64 ``[n]``, which draw of its request each one is.

    Returns:
        float64 ``[n]``.
    """
    zero = np.zeros_like(indices)
    counter = np.stack([indices & _LOW, indices >> _HALF, zero, zero])
    high, low, _, _ = philox4x32(counter, np.stack([seeds & _LOW, seeds >> _HALF]))
    return ((high << _HALF | low) >> np.uint64(11)) * 2.0**-53
