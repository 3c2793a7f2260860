"""As many threads as there are cores to run them, and a word where OpenMP's settings stand against it.

A decode step is a hundred short parallel regions. One thread more than can run makes all others wait for it at the end
of each; a thread that sleeps between regions has to be woken at each.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping

import torch

from chunkc.runtime.control_groups import cpu_quota


def available_cores() -> list[int]:
    """The cores this process may use, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def settle_threads(environment: Mapping[str, str] = os.environ) -> None:
    """Take torch's threads down to what the process's control groups let run, and warn of what makes steps slow.

    torch takes a thread a core without knowing of such limits. A number that somebody asked for is left as it is: one
    in ``OMP_NUM_THREADS`` or ``MKL_NUM_THREADS``, or one above the number of cores.
    """
    cores, quota, threads = len(available_cores()), cpu_quota(), torch.get_num_threads()
    allowed = cores if quota is None else min(cores, max(1, math.floor(quota)))
    if threads > allowed:
        why = f"this process may use {cores}" if allowed == cores else f"its control group allows {quota:g}"
        if allowed == cores and (names := _binding(environment)):
            why += f"; {', '.join(names)} may have bound it there: unset it"
        said = f"torch has {threads} threads, more than the cores they may run on ({why})"
        if threads > cores or "OMP_NUM_THREADS" in environment or "MKL_NUM_THREADS" in environment:
            _warn(f"{said}: steps take many times as long; give torch.set_num_threads({allowed})")
        else:
            torch.set_num_threads(allowed)
            _warn(f"{said}: it has {allowed} from now on; torch.set_num_threads before chunkc.compile says otherwise")
            threads = allowed
    if threads > 1:
        for trouble in _troubles(environment, threads):
            _warn(trouble)


def warn_of_binding(environment: Mapping[str, str] = os.environ) -> None:
    """Warn where OpenMP binds threads to cores by itself: it would bind those of two lanes to the same ones."""
    names = _binding(environment)
    if names:
        _warn(
            f"{', '.join(names)} has OpenMP bind threads to cores, where multiplex='streams' gives decodes and prefill "
            "cores of their own: unset it, or they may wait for each other on the same ones"
        )


def _binding(environment: Mapping[str, str]) -> list[str]:
    """Names of the settings that have OpenMP bind threads to cores."""
    names = [name for name in ("OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY") if environment.get(name)]
    bound = environment.get("OMP_PROC_BIND", "false").lower() != "false"
    return [*names, "OMP_PROC_BIND"] if bound else names


def _troubles(environment: Mapping[str, str], threads: int) -> list[str]:
    found = []
    passive = environment.get("OMP_WAIT_POLICY", "").lower() == "passive"
    if passive or environment.get("GOMP_SPINCOUNT") == "0":
        name = "OMP_WAIT_POLICY=passive" if passive else "GOMP_SPINCOUNT=0"
        found.append(
            f"with {name} threads sleep between the operators of a step, which then takes up to twice as long, unless "
            "others need the cores"
        )
    limit = environment.get("OMP_THREAD_LIMIT", "")
    if limit.isdigit() and int(limit) < threads:
        found.append(f"OMP_THREAD_LIMIT={limit} keeps torch from its {threads} threads")
    if environment.get("OMP_DYNAMIC", "").lower() == "true":
        found.append("with OMP_DYNAMIC=true OpenMP takes fewer threads where the machine looks busy")
    return found


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)  # who called chunkc.compile
