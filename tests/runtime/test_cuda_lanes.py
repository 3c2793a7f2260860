"""A GPU as a machine, with stand-ins for torch.cuda and the driver: what is asked of them, in which order."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from toy_cuda import ToyCuda, ToyDriver

from chunkc.runtime.cuda_lanes import CudaMachine, CudaStream
from chunkc.runtime.fences import PASSED
from chunkc.runtime.multiplex import division_of
from chunkc.runtime.sm_partition import Partitioner, PartitionError, SmDivision

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def external(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda raw, device: SimpleNamespace(name=f"raw {raw}", cuda_stream=raw)
    )


def machine_of(cuda: ToyCuda, driver: ToyDriver | None = None) -> CudaMachine:
    return CudaMachine(DEVICE, cuda=cuda, partitioner=None if driver is None else Partitioner(DEVICE, driver))


def test_a_fence_is_an_event_that_streams_wait_for_and_the_host_does_not():
    cuda = ToyCuda()
    first, second = (CudaStream(cuda.Stream(), cuda) for _ in range(2))
    fence = first.record()
    second.wait(fence)
    assert cuda.calls[2:] == [("record", "stream 0", fence.event), ("wait", "stream 1", fence.event)]
    assert not fence.passed()
    fence.wait()
    assert fence.passed()
    second.wait(PASSED)
    assert len(cuda.calls) == 5, "what is no event of a device is waited for by the host"


def test_lanes_work_on_their_streams_in_threads_of_their_own(external):
    cuda = ToyCuda()
    machine = machine_of(cuda, ToyDriver())
    decode, prefill = machine.lanes(SmDivision(16, 116))

    def seen():
        return cuda._thread.device, cuda.current_stream().name, machine.units, machine.current

    assert decode.submit(seen).result() == (DEVICE, "raw 101", 16, 101)
    assert prefill.submit(seen).result() == (DEVICE, "raw 102", 116, 102)
    assert machine.units == 132
    with machine.active():
        assert cuda.current_stream() is machine.whole.stream
    fence = decode.record()
    prefill.stream.stream.wait_event = lambda event: cuda.calls.append(("wait", "prefill", event))
    prefill.wait(fence)
    assert cuda.calls[-2:] == [("record", "raw 101", fence.event), ("wait", "prefill", fence.event)]


def test_tensors_are_kept_for_the_stream_that_goes_on_with_them():
    cuda = ToyCuda()
    machine = CudaMachine(DEVICE, cuda=cuda)
    kept = []
    with machine.active():
        machine.keep([SimpleNamespace(record_stream=kept.append)])
        assert machine.current == machine.whole.stream.cuda_stream
    assert kept == [machine.whole.stream]


def test_the_weights_are_there_before_the_first_stream():
    cuda = ToyCuda()
    machine = CudaMachine(torch.device("cuda"), cuda=cuda)
    assert machine.device == torch.device("cuda", 3), "the current one"
    assert cuda.calls[0] == ("synchronize device",)


def test_both_sides_come_from_one_cut_and_are_made_once(external):
    driver = ToyDriver()
    machine = machine_of(ToyCuda(), driver)
    for _ in range(2):
        machine.lanes(SmDivision(24, 108))
    assert driver.contexts == [(0, 24), (24, 132)]
    machine.lanes(SmDivision(16, 116))
    assert driver.contexts[2:] == [(0, 16), (16, 132)]


@pytest.mark.parametrize(
    "sms, step, first, last", [(132, 8, "8 + 124 SMs", "64 + 68 SMs"), (84, 2, "2 + 82 SMs", "42 + 42 SMs")]
)
def test_divisions_are_in_the_hardwares_steps(sms, step, first, last):  # fmt: skip
    machine = machine_of(ToyCuda(sms), ToyDriver(sms, step))
    every = machine.divisions()
    assert [str(every[0]), str(every[-2]), str(every[-1])] == [first, last, f"{sms} SMs for both"]
    assert all(each.decode + each.prefill == sms for each in every[:-1])
    assert [each.decode for each in every[:-1]] == list(range(step, sms // 2 + 1, step))


def test_the_next_larger_share_is_taken():
    machine = machine_of(ToyCuda(), ToyDriver())
    every = machine.divisions()
    assert str(division_of(20, every)) == "24 + 108 SMs"
    assert str(division_of(1, every)) == "8 + 124 SMs"
    assert str(division_of(100, every)) == "132 SMs for both"
    division_of(132, every)
    with pytest.raises(ValueError, match="decode_cores=133: must be 1 to 132"):
        division_of(133, every)


def test_without_green_contexts_the_streams_share_the_sms_and_that_is_said_once():
    cuda = ToyCuda()
    machine = machine_of(cuda, ToyDriver(failing=("cuDevSmResourceSplitByCount",)))
    with pytest.warns(RuntimeWarning, match="cuDevSmResourceSplitByCount fails with CUDA_ERROR_801.*share all SMs"):
        (division,) = machine.divisions()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        machine.divisions()
        decode, prefill = machine.lanes(division)
    assert decode.stream.stream.priority < prefill.stream.stream.priority, "a decode is taken first"
    assert decode.submit(lambda: machine.units).result() == 132


def test_contexts_that_cannot_be_made_fall_back_too(external):
    machine = machine_of(ToyCuda(), ToyDriver(failing=("cuGreenCtxCreate",)))
    with pytest.warns(RuntimeWarning, match="cuGreenCtxCreate"):
        decode, _ = machine.lanes(SmDivision(16, 116))
    assert decode.submit(lambda: machine.units).result() == 132


def test_what_the_driver_refuses_is_named():
    with pytest.raises(PartitionError, match="no cuDeviceGet"):
        Partitioner(DEVICE, SimpleNamespace())
    partitioner = Partitioner(DEVICE, ToyDriver())
    with pytest.raises(PartitionError, match=r"cuts 24 \+ 108 SMs, not 20 \+ 112"):
        partitioner.streams(SmDivision(20, 112))


def test_without_cuda_bindings_it_is_said_how_to_get_them(monkeypatch):
    import builtins

    real = builtins.__import__

    def missing(name, *rest):
        if name.startswith("cuda.bindings"):
            raise ImportError("no cuda")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(PartitionError, match="pip install cuda-bindings"):
        Partitioner(DEVICE)
