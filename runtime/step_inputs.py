"""What a graph is given beside pages and weights: the batch, and the plan of its attention.

On the host's cores these are the batch's own tensors. On a device all of them go there in one copy, from memory that
the device reads by itself, so that the host need not wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from chunkc.kernels.device import DeviceModel, cpu
from chunkc.kernels.tasks import plan_tasks
from chunkc.kernels.triton_config import Device, plan_step
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.runtime.batch import PackedBatch

if TYPE_CHECKING:
    from chunkc.kernels.metadata import AttentionMetadata

Tensors = dict[str, torch.Tensor]

#: tensors in one allocation begin at multiples of so many bytes, as they would in allocations of their own: kernels
#: are compiled for what is aligned
_ALIGNMENT = 256


class StepInputs(Protocol):
    """Makes a step's inputs, by name."""

    def __call__(self, batch: PackedBatch) -> Tensors:
        """All inputs of the graph but its pages, where it runs."""


def of_batch(batch: PackedBatch) -> Tensors:
    """The inputs that are the same for all models."""
    attention = batch.attention
    return {
        "input_ids": batch.input_ids,
        "positions": batch.positions,
        "logits_rows": batch.logits_rows,
        "q_offsets": attention.q_offsets,
        "kv_lens": attention.kv_lens,
        "page_table": attention.page_table,
        "slot_mapping": attention.slot_mapping,
    }


def _by_plan(layers: Sequence[AttentionLayer]) -> dict[int, AttentionLayer]:
    """A layer for each plan; those of one plan are of one shape."""
    return {layer.plan: layer for layer in layers}


class HostInputs:
    """For the cores of this process, as many as torch has threads.

    Args:
        layers: the graph's attention calls.
        page_size: tokens per page.
    """

    def __init__(self, layers: Sequence[AttentionLayer], page_size: int) -> None:
        self._plans, self._page_size = _by_plan(layers), page_size

    def __call__(self, batch: PackedBatch) -> Tensors:
        """See ``StepInputs``."""
        inputs, attention = of_batch(batch), batch.attention
        units = torch.get_num_threads()
        for number, layer in self._plans.items():
            plan = plan_tasks(
                attention.q_offsets,
                attention.kv_lens,
                layer.shape,
                page_size=self._page_size,
                units=units,
                device=cpu(units, layer.dtype.itemsize),
            )
            inputs[f"tasks_{number}"], inputs[f"merges_{number}"] = plan.tasks, plan.merges
        return inputs


class DeviceInputs:
    """For a device with the Triton body of attention.

    Args:
        layers, page_size: see ``HostInputs``.
        target: where the tensors go.
        tiles_for: what the tiles depend on.
        model: what the device can do, for elements of so many bytes.
        units: how many SMs the calling thread's work has.
    """

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        page_size: int,
        *,
        target: torch.device,
        tiles_for: Device,
        model: Callable[[int], DeviceModel],
        units: Callable[[], int],
    ) -> None:
        self._plans, self._page_size = _by_plan(layers), page_size
        self.target, self._tiles_for, self._units = target, tiles_for, units
        self._models = {layer.dtype.itemsize: model(layer.dtype.itemsize) for layer in layers}

    def __call__(self, batch: PackedBatch) -> Tensors:
        """See ``StepInputs``."""
        return Layout.of(inputs := self.on_host(batch)).upload(inputs, self.target)

    def on_host(self, batch: PackedBatch) -> Tensors:
        """The inputs before they are copied."""
        return {**of_batch(batch), **self.plans(batch.attention)}

    def plans(self, attention: AttentionMetadata) -> Tensors:
        """The task tables and merges of a batch, on the CPU."""
        device = dataclasses.replace(self._tiles_for, units=self._units())
        tables: Tensors = {}
        for number, layer in self._plans.items():
            itemsize = layer.dtype.itemsize
            plan = plan_step(
                attention.q_offsets,
                attention.kv_lens,
                layer.shape,
                page_size=self._page_size,
                itemsize=itemsize,
                device=device,
                model=self._models[itemsize],
            )
            tables[f"tasks_{number}"], tables[f"merges_{number}"] = plan.tasks, plan.merges
        return tables


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where tensors lie in one allocation.

    Attributes:
        places: (name, offset in bytes, shape, dtype) of each.
        size: of the allocation, in bytes.
    """

    places: tuple[tuple[str, int, tuple[int, ...], torch.dtype], ...]
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> Layout:
        """For tensors of these shapes and dtypes, one behind the other."""
        places, end = [], 0
        for name, tensor in tensors.items():
            places.append((name, end, tuple(tensor.shape), tensor.dtype))
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(places), end)

    def views(self, memory: torch.Tensor) -> Tensors:
        """The tensors in an allocation: uint8 ``[size]``."""
        views = {}
        for name, offset, shape, dtype in self.places:
            count = dtype.itemsize
            for length in shape:
                count *= length
            views[name] = memory[offset : offset + count].view(dtype).view(shape)
        return views

    def fill(self, memory: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes the tensors into an allocation on the CPU."""
        for name, view in self.views(memory).items():
            view.copy_(tensors[name])

    def staged(self, tensors: Mapping[str, torch.Tensor], target: torch.device) -> torch.Tensor:
        """The tensors in an allocation on the CPU from which ``target`` can copy by itself. Torch hands its memory out
        again only when copies out of it have ended."""
        memory = torch.empty(self.size, dtype=torch.uint8, pin_memory=target.type == "cuda")
        self.fill(memory, tensors)
        return memory

    def upload(self, tensors: Mapping[str, torch.Tensor], target: torch.device) -> Tensors:
        """The tensors on ``target``, by one copy on the current stream. The host does not wait for it."""
        return self.views(self.staged(tensors, target).to(target, non_blocking=True))
