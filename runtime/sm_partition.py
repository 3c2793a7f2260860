"""The SMs of a GPU cut in two, by the CUDA driver's green contexts: a stream for each side.

Both sides come from one cut of the device's SMs, so none is in both. (``torch.cuda.green_contexts`` cuts the device
anew for each context, from the same end; two of its contexts can have SMs in common, and so are limits rather than a
division.) The calls are those of ``cuda.bindings``, which torch's CUDA wheels bring along.

This has not run on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class PartitionError(RuntimeError):
    """The driver does not cut the SMs; says which call failed, and how."""


@dataclass(frozen=True)
class SmDivision:
    """How many SMs the decodes and the prefill have; all of them for both where they are not divided."""

    decode: int
    prefill: int
    divided: bool = True

    def __str__(self) -> str:
        return f"{self.decode} + {self.prefill} SMs" if self.divided else f"{self.decode} SMs for both"

    @property
    def decode_units(self) -> int:
        """SMs of the decodes."""
        return self.decode


class Partitioner:
    """Cuts one device.

    Args:
        device: a CUDA device that torch has initialised.
        driver: ``cuda.bindings.driver``; imported unless given.

    Raises:
        PartitionError: there is no such module, or the driver has no green contexts.
    """

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        if driver is None:
            try:
                from cuda.bindings import driver
            except ImportError as error:
                raise PartitionError(
                    f"cuda.bindings cannot be imported ({error}); pip install cuda-bindings"
                ) from error
        self._driver, self._torch_device = driver, device
        self._device = self._call("cuDeviceGet", device.index or 0)
        self._all = self._call("cuDeviceGetDevResource", self._device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
        self._kept: list[Any] = []  # contexts live as long as the process

    @property
    def num_sms(self) -> int:
        """SMs of the device."""
        return int(self._all.sm.smCount)

    def divisions(self) -> list[SmDivision]:
        """What the hardware can do, in its own steps, the fewest SMs for the decodes first; these get half at most.

        Raises:
            PartitionError: the driver cannot cut the device.
        """
        found: dict[int, SmDivision] = {}
        wanted = 1
        while wanted <= self.num_sms // 2:
            group, rest = self._cut(wanted)
            have = int(group.sm.smCount)
            if not rest.sm.smCount or have > self.num_sms // 2:
                break
            found[have] = SmDivision(have, int(rest.sm.smCount))
            wanted = max(have, wanted) + 1
        return list(found.values())

    def streams(self, division: SmDivision) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """A stream on the decodes' SMs, and one on the prefill's. Neither waits for the default stream.

        Raises:
            PartitionError: the driver does not make them, or gives another division.
        """
        group, rest = self._cut(division.decode)
        have = int(group.sm.smCount), int(rest.sm.smCount)
        if have != (division.decode, division.prefill):
            raise PartitionError(f"the driver cuts {have[0]} + {have[1]} SMs, not {division}")
        return self._stream(group), self._stream(rest)

    def _cut(self, sms: int) -> tuple[Any, Any]:
        """At least so many SMs, and the others."""
        groups, count, rest = self._call("cuDevSmResourceSplitByCount", 1, self._all, 0, sms)
        if int(count) != 1:
            raise PartitionError(f"the driver cannot cut {sms} SMs out of {self.num_sms}")
        return groups[0], rest

    def _stream(self, resource: Any) -> torch.cuda.Stream:
        driver = self._driver
        description = self._call("cuDevResourceGenerateDesc", [resource], 1)
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = self._call("cuGreenCtxCreate", description, self._device, flags)
        self._kept.append(context)
        raw = self._call("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        return torch.cuda.ExternalStream(int(raw), device=self._torch_device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The results of a driver call, a single one as it is.

        Raises:
            PartitionError: there is no such call, or it failed.
        """
        function = getattr(self._driver, name, None)
        if function is None:
            raise PartitionError(f"this driver has no {name}")
        try:
            status, *results = function(*arguments)
        except RuntimeError as error:  # from cuda.bindings, where the driver's library lacks the call
            raise PartitionError(f"{name}: {error}") from error
        if int(status) != 0:
            raise PartitionError(f"{name} fails with {getattr(status, 'name', status)}")
        return results[0] if len(results) == 1 else results
