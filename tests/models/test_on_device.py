"""A model moved to a device: nothing of it stays on the CPU, and an engine gives the same tokens."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from test_cursor import World
from tiny import build

from chunkc import on_device
from chunkc.config import EngineConfig, SamplingParams
from chunkc.errors import UnsupportedModelError
from chunkc.kernels import cpu_backend
from chunkc.kernels import device as device_models
from chunkc.kernels.triton_config import Device
from chunkc.runtime.batch import Chunk, pack
from chunkc.runtime.decode_graphs import DecodeGraphs
from chunkc.runtime.engine import Engine
from chunkc.runtime.fences import Immediate
from chunkc.runtime.runner import GraphRunner
from chunkc.runtime.step_inputs import DeviceInputs

UNITS = 3
GREEDY = SamplingParams(max_new_tokens=9, ignore_eos=True)
PROMPTS = [[(number * 31 + at * 7) % 211 for at in range(length)] for number, length in enumerate((3, 40, 1, 17))]


class LikeAGpu:
    """A machine that plans as for a GPU and copies inputs as to one, and is the CPU."""

    device = torch.device("cpu")
    whole = Immediate()
    current = 0

    def keep(self, tensors):
        self.kept = list(tensors)

    def active(self):
        return nullcontext()

    def inputs(self, layers, page_size):
        return DeviceInputs(
            layers,
            page_size,
            target=self.device,
            tiles_for=Device("sm_90", UNITS, 227 * 1024),
            model=lambda itemsize: device_models.H200,
            units=lambda: UNITS,
        )


@pytest.fixture(scope="module")
def prepared():
    cpu_backend.load()
    return on_device.prepare(build("llama"))


def runner_of(work, graph=None) -> GraphRunner:
    return GraphRunner(
        graph or work.graph,
        work.prepared.layers,
        vocab_size=work.prepared.vocab_size,
        max_positions=work.prepared.longest,
        page_size=4,
        num_pages=64,
        machine=LikeAGpu(),
    )


def served(runner) -> list[list[int]]:
    engine = Engine(runner, config=EngineConfig(budget=16))
    return [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def expected(prepared):
    model = build("llama")
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=9, min_new_tokens=9, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        for prompt in PROMPTS
    ]


def test_inputs_as_for_a_gpu_give_the_same_tokens(prepared, expected):
    assert served(runner_of(prepared)) == expected


def test_what_another_stream_goes_on_with_is_kept_for_it(prepared):
    """Else its memory would go back to the first stream, whose next work need not wait for the other."""
    runner = runner_of(prepared)
    machine = runner.machine
    machine.kept = None
    world = World((9, 0))
    forward = runner.start(pack([Chunk(world.requests[0], 0, 9)], world.pool))
    forward.advance()
    assert machine.kept is None, "its own stream needs nothing"
    machine.current = 1
    hidden = [value for value in forward._state if value is not None]
    forward.advance()
    assert {id(value) for value in machine.kept} == {id(value) for value in hidden}
    machine.kept = None
    forward.advance()
    assert machine.kept is None


class NoPadding:
    """The CPU's bodies know no end of a table: takes its rows of -1 off, as the Triton body skips them."""

    def __init__(self, graph) -> None:
        self.graph, self.num_parts = graph, graph.num_parts
        self.start, self.advance, self.logits, self.weights_of = (
            graph.start,
            graph.advance,
            graph.logits,
            graph.weights_of,
        )
        self.padded: list[int] = []

    def __call__(self, inputs):
        tables = {name: each for name, each in inputs.items() if name.startswith(("tasks", "merges"))}
        self.padded.append(int((inputs["slot_mapping"] < 0).sum()))
        return self.graph({**inputs, **{name: each[each[:, 0] >= 0] for name, each in tables.items()}})


def capture_nothing(work):
    """Computes anew at every replay, into the same memory."""
    result = work().clone()
    return lambda: result.copy_(work()), result


def graphs_for(runner, **options) -> DecodeGraphs:
    options = {"sizes": [1, 4], "longest": 60, "units": UNITS, "stream": lambda: 7, **options}
    return DecodeGraphs(runner, runner.layers, capture=capture_nothing, **options)


def test_replayed_decode_steps_give_the_same_tokens(prepared, expected):
    graph = NoPadding(prepared.graph)
    runner = runner_of(prepared, graph)
    graphs = runner.decode_graphs = graphs_for(runner)
    pages = runner._pages["k_pages_0"].fill_(7.0)
    graphs.record()
    assert (pages == 7.0).all(), "recording writes no pages"
    assert graph.padded == [1, 1, 4, 4]
    graph.padded.clear()
    assert served(runner) == expected
    assert graphs.replayed >= 8
    assert {1, 2, 3} & set(graph.padded), "batches of other sizes are padded"


@pytest.mark.parametrize("options", [{"sizes": []}, {"longest": 4}, {"units": -99}, {"stream": None}])
def test_what_does_not_fit_runs_as_ever(prepared, expected, options):
    """No size, too long a context, too long a table, another stream."""
    runner = runner_of(prepared, NoPadding(prepared.graph))
    streams = iter(range(10_000))
    if "stream" in options:
        options = {"stream": lambda: next(streams)}
    if "units" in options:  # recorded, but no plan fits
        graphs = graphs_for(runner)
        graphs.record()
        graphs._table_lengths = lambda size: {"tasks_0": 0}
    else:
        graphs = graphs_for(runner, **options)
        graphs.record()
    runner.decode_graphs = graphs
    assert served(runner) == expected
    assert graphs.replayed == 0 or options == {"longest": 4}


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "gemma2", "mixtral", "opt"))]
)
def test_nothing_stays_on_the_cpu(prepared, name):
    """On the device "meta" nothing is computed, and nothing that lies elsewhere can be mixed in."""
    work = prepared if name == "llama" else on_device.prepare(build(name))
    meta = torch.device("meta")
    graph = on_device.move(work.graph, meta)
    assert all(weight.device.type == "cpu" for weight in work.graph.weights.values()), "the given one is as it was"
    runner = runner_of(work)
    sizes = {"input_ids": 5, "positions": 5, "slot_mapping": 5, "logits_rows": 2, "q_offsets": 3, "kv_lens": 2}
    inputs = {}
    for each in graph.program.inputs:
        if "_pages_" in each:
            inputs[each] = runner._pages[each].to(meta)
        elif each.startswith(("tasks", "merges")):
            inputs[each] = torch.empty(6, 8, dtype=torch.int32, device=meta)
        elif each == "page_table":
            inputs[each] = torch.empty(2, 3, dtype=torch.int32, device=meta)
        else:
            wide = each in ("input_ids", "positions", "slot_mapping", "logits_rows")
            inputs[each] = torch.empty(sizes[each], dtype=torch.int64 if wide else torch.int32, device=meta)
    state = graph.start(inputs)
    for part in range(graph.num_parts):
        graph.advance(state, part, part + 1)
        assert {value.device.type for value in state if value is not None} == {"meta"}
    assert graph.logits(state).shape == (2, work.prepared.vocab_size)


def test_tensors_that_a_part_makes_are_made_on_the_device():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    aten = torch.ops.aten
    made = [
        graph.call_function(aten.arange.default, (3,)),
        graph.call_function(aten.full.default, ([3], 1.0), {"device": torch.device("cpu")}),
        graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.float64}),
        graph.call_function(aten.zeros_like.default, (x,), {"device": torch.device("cpu")}),
    ]
    graph.output(tuple(made))
    function = on_device._moved(torch.fx.GraphModule({}, graph), torch.device("meta"))
    assert all(each.device.type == "meta" for each in function(torch.empty(3, device="meta")))
    assert made[1].kwargs["device"] == torch.device("cpu"), "the given one is as it was"


def test_what_is_made_for_the_cpu_is_not_moved(prepared):
    compiled = on_device.LoweredGraph(prepared.graph.program, [len] * 9, prepared.graph.weights)
    with pytest.raises(UnsupportedModelError, match="mode 'eager'"):
        on_device.move(compiled, torch.device("meta"))
    packed = on_device.LoweredGraph(
        prepared.graph.program, prepared.graph.functions, prepared.graph.weights, [object()]
    )
    with pytest.raises(UnsupportedModelError, match="pack_linears"):
        on_device.move(packed, torch.device("meta"))
