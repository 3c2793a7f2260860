"""A step's inputs for a device: one copy, aligned, and a plan of the device's own."""

from __future__ import annotations

import torch
from test_cursor import World

from chunkc.kernels import device as device_models
from chunkc.kernels.tasks import AttentionShape
from chunkc.kernels.triton_config import Device, plan_step
from chunkc.passes.attention_layer import AttentionLayer
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.step_inputs import DeviceInputs, Layout, of_batch

SHAPE = AttentionShape(8, 2, 64, 64)
H200 = Device("sm_90", units=132, shared_memory=227 * 1024)


def inputs_for(units) -> DeviceInputs:
    layers = [AttentionLayer(index, SHAPE, 0, torch.bfloat16) for index in range(2)]
    return DeviceInputs(
        layers, 4, target=torch.device("cpu"), tiles_for=H200, model=lambda size: device_models.H200, units=units
    )


def test_tensors_come_through_one_allocation_as_they_were():
    tensors = {
        "a": torch.arange(5),
        "empty": torch.empty(0, 8, dtype=torch.int32),
        "b": torch.arange(12, dtype=torch.int32).view(3, 4),
    }
    layout = Layout.of(tensors)
    views = layout.upload(tensors, torch.device("cpu"))
    assert views.keys() == tensors.keys()
    for name, view in views.items():
        assert view.dtype == tensors[name].dtype and torch.equal(view, tensors[name])
    assert all(offset % 256 == 0 for _, offset, _, _ in layout.places), "as in allocations of their own"
    assert len({view.untyped_storage().data_ptr() for view in views.values()}) == 1


def test_a_step_is_planned_for_the_units_of_the_thread_that_starts_it():
    world = World((900, 899), (7, 0))
    chunks = [Chunk(request, request.num_computed, request.num_tokens) for request in world.requests]
    batch = pack(chunks, world.pool)
    tables = {}
    for units in (132, 3):
        made = inputs_for(lambda units=units: units)(batch)
        assert {name for name in made if not name.startswith(("tasks", "merges"))} == of_batch(batch).keys()
        plan = plan_step(
            batch.attention.q_offsets,
            batch.attention.kv_lens,
            SHAPE,
            page_size=4,
            itemsize=2,
            device=Device("sm_90", units, H200.shared_memory),
            model=device_models.H200,
        )
        assert torch.equal(made["tasks_0"], plan.tasks) and torch.equal(made["merges_0"], plan.merges)
        tables[units] = plan.tasks
    assert len(tables[132]) > len(tables[3]), "more units, more pieces"
