"""Small captured graphs for the tests of passes, and ways to run them.

``torch.export`` takes a second even for a tiny module, so the cases of one test file are exported together and taken
apart again::

    captured = Captured(Cases({"scaled": lambda at: at.x * 2, "mean": lambda at: at.x - at.x.mean(1, True)}))
    graph_module = captured.graph("scaled")         # inputs input_ids, position_ids [1, S]; output [1, S, V]
    expected = captured.logits("scaled", ids)       # [S, V], from the module itself
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import build
from torch import fx, nn

from chunkc import compat
from chunkc.capture import capture
from chunkc.errors import ChunkcError, UnsupportedModelError
from chunkc.kernels.tasks import plan_tasks
from chunkc.passes.attributes import MODEL_ATTRIBUTE
from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.core import core_passes
from chunkc.passes.fx_tools import placeholders, value
from chunkc.passes.pipeline import PassPipeline
from chunkc.passes.propagate import propagate

VOCAB = 29
WIDTH = 12
PAGE_SIZE = 4
INF = float("inf")

#: what a case computes: from ``at.x`` [1, S, WIDTH], ``at.ids``, ``at.positions`` [1, S] and the members of ``Cases``
#: to [1, S, V]
Function = Callable[[SimpleNamespace], torch.Tensor]


class Cases(nn.Module):
    """Many small functions of the same embedded tokens; each is a submodule, so that module paths name it.

    Args:
        functions: the cases by name; a value may be a module that takes ``at`` too.
        prepare: adds to ``at`` what several cases share.
        **members: parameters, buffers (plain tensors) and modules that cases use as ``at.<name>``.
    """

    def __init__(
        self,
        functions: Mapping[str, Function],
        prepare: Callable[[SimpleNamespace], None] | None = None,
        **members: Any,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        setattr(self, MODEL_ATTRIBUTE, nn.ModuleDict({name: _Case(f) for name, f in functions.items()}))
        self.prepare = prepare
        self.member_names = tuple(members)
        for name, member in members.items():
            if isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)
        seeded(self)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, only: str | None = None
    ) -> tuple[torch.Tensor, ...]:
        members = {name: getattr(self, name) for name in self.member_names}
        at = SimpleNamespace(x=self.embed(input_ids), ids=input_ids, positions=position_ids, **members)
        if self.prepare is not None:
            self.prepare(at)
        cases = getattr(self, MODEL_ATTRIBUTE)
        return tuple(cases[name](at) for name in ([only] if only else cases))


class _Case(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, at: SimpleNamespace) -> torch.Tensor:
        return self.function(at)


def seeded(module: nn.Module) -> nn.Module:
    """Draw all parameters anew, the same in every run; evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return module.eval()


def drawn(*shape: int) -> torch.Tensor:
    """A random tensor, the same in every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def tokens(length: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """Random token ids, int64 [length]."""
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))


class Captured:
    """The graphs of cases, exported in one go in the way of ``chunkc.capture``."""

    def __init__(self, cases: Cases) -> None:
        self.cases = cases
        ids = torch.arange(13)[None]
        sizes = ({1: torch.export.Dim.DYNAMIC}, {1: torch.export.Dim.DYNAMIC}, None)
        with torch.no_grad(), compat.one_graph_for_every_size():
            program = torch.export.export(cases, (ids, ids.clone(), None), dynamic_shapes=sizes, strict=False)
            self.whole = compat.exported_module(program.run_decompositions({}))
        for node in list(self.whole.graph.nodes):
            if node.op == "placeholder" and node.target == "only":
                self.whole.graph.erase_node(node)

    def graph(self, name: str) -> fx.GraphModule:
        """A graph of its own for one case; parameters are the module's."""
        outputs = self.whole.graph.output_node().args[0]
        output = outputs[list(getattr(self.cases, MODEL_ATTRIBUTE)).index(name)]
        needed = {output}
        for node in reversed(self.whole.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.whole.graph.nodes:
            if node in needed or node.op == "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(copies[output])
        return fx.GraphModule(self.whole, graph)

    def logits(self, name: str, ids: torch.Tensor, first_position: int = 0) -> torch.Tensor:
        """Logits [S, V] of the untouched module."""
        positions = torch.arange(first_position, first_position + len(ids))
        with torch.no_grad():
            return self.cases(ids[None], positions[None], name)[0][0]


@functools.cache
def _huggingface(name: str) -> tuple[nn.Module, fx.GraphModule]:
    model = build(name, "eager")  # older transformers leave Gemma 2's softcap out of their SDPA
    return model, capture(model, "interface").graph_module


def huggingface(name: str) -> tuple[nn.Module, fx.GraphModule]:
    """A tiny model of ``tiny.CONFIGURATIONS`` (not to be changed) and a graph of its own."""
    model, graph_module = _huggingface(name)
    return model, fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))


def reference_logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Logits [S, V] of a HuggingFace model for one prompt."""
    with torch.no_grad():
        return model(input_ids=ids[None], use_cache=False).logits[0]


def run_pass(
    graph_pass: GraphPass, graph_module: fx.GraphModule, shared: PassContext | None = None, **context: Any
) -> PassReport:
    """One pass alone, with the graph made runnable after it; in a context that several share, or in one of its own."""
    with compat.one_graph_for_every_size():
        report = graph_pass.run(graph_module, shared or PassContext(**context))
        graph_module.graph.lint()
        graph_module.recompile()
        propagate(graph_module)
    return report


def run_passes(
    graph_module: fx.GraphModule, stop_after: str | None = None, extra: Sequence[GraphPass] = (), **context: Any
) -> PassContext:
    """The core pipeline, with all its checks, up to a pass."""
    shared = PassContext(**context)
    with compat.one_graph_for_every_size():
        PassPipeline([*core_passes(), *extra]).run(graph_module, shared, stop_after=stop_after)
    return shared


def count_ops(graph_module: fx.GraphModule) -> Counter[str]:
    """How often each operator is called, by the name of its packet: ``count["aten.linear"]``."""
    names = (str(node.target) for node in graph_module.graph.nodes if node.op == "call_function")
    return Counter(".".join(name.split(".")[:2]) for name in names)


@contextmanager
def refused(reason: str, *, op: str, module: str, error: type[ChunkcError] = UnsupportedModelError) -> Iterator[None]:
    """The body must refuse for this reason (a regular expression), naming op and module."""
    with pytest.raises(error, match=reason) as caught:
        yield
    assert caught.value.op is not None and caught.value.op.startswith(op), caught.value
    assert caught.value.module == module, caught.value


class Batches:
    """Runs a paged graph on packed batches. ``pages`` start as NaN, so that reading what was not written shows.

    Args:
        graph_module, context: after page_attention.
        prompts: int64 [S] each, one per request.
    """

    def __init__(self, graph_module: fx.GraphModule, context: PassContext, prompts: Sequence[torch.Tensor]) -> None:
        self.graph_module, self.context, self.prompts = graph_module, context, prompts
        self.inputs = placeholders(graph_module.graph)
        counts = [-(-len(prompt) // PAGE_SIZE) for prompt in prompts]
        self.tables = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).split(counts)
        self.pages = {
            name: torch.full((sum(counts), value(node).shape[1], PAGE_SIZE, value(node).shape[3]), torch.nan)
            for name, node in self.inputs.items()
            if "_pages_" in name
        }

    def slots(self, request: int, start: int, end: int) -> torch.Tensor:
        """Where tokens start .. end - 1 of a request lie in the pages, page * PAGE_SIZE + offset."""
        positions = torch.arange(start, end)
        return self.tables[request][positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def step(self, *chunks: tuple[int, int, int], rows: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [L, V] of one batch of chunks (request, start, end), of all its rows or of those given."""
        width = max(len(table) for table in self.tables)
        padded = [
            nn.functional.pad(self.tables[request], (0, width - len(self.tables[request]))) for request, *_ in chunks
        ]
        count = sum(end - start for _, start, end in chunks)
        values = {
            **self.pages,
            "input_ids": torch.cat([self.prompts[request][start:end] for request, start, end in chunks]),
            "positions": torch.cat([torch.arange(start, end) for _, start, end in chunks]),
            "slot_mapping": torch.cat([self.slots(*chunk) for chunk in chunks]),
            "q_offsets": torch.tensor([0, *(end - start for _, start, end in chunks)]).cumsum(0).int(),
            "kv_lens": torch.tensor([end for *_, end in chunks], dtype=torch.int32),
            "page_table": torch.stack(padded).int(),
            "logits_rows": torch.arange(count) if rows is None else rows,
        }
        for layer in self.context.attention_layers:
            plan = plan_tasks(values["q_offsets"], values["kv_lens"], layer.shape, page_size=PAGE_SIZE, units=2)
            values[f"tasks_{layer.plan}"], values[f"merges_{layer.plan}"] = plan.tasks, plan.merges
        with torch.no_grad():
            return fx.Interpreter(self.graph_module).run(*[values[name] for name in self.inputs])

    def whole_prompts(self) -> list[torch.Tensor]:
        """Logits [S, V] of every token of every prompt, computed in uneven chunks that share steps."""
        done = [0] * len(self.prompts)
        logits: list[list[torch.Tensor]] = [[] for _ in self.prompts]
        sizes = (1, 5, 3, 8)
        step = 0
        while any(start < len(prompt) for start, prompt in zip(done, self.prompts, strict=True)):
            chunks = []
            for request, prompt in enumerate(self.prompts):
                start = done[request]
                end = min(len(prompt), start + sizes[(step + request) % len(sizes)])
                if start < end and request <= step:  # requests join one after the other
                    chunks.append((request, start, end))
                    done[request] = end
            parts = self.step(*chunks).split([end - start for _, start, end in chunks])
            for (request, *_), part in zip(chunks, parts, strict=True):
                logits[request].append(part)
            step += 1
        return [torch.cat(parts) for parts in logits]


def serve(captured: Captured, name: str, *, lengths: Sequence[int] = (19, 7), **context: Any) -> PassContext:
    """Page a case and compare packed, chunked batches with the untouched module, token by token."""
    graph_module = captured.graph(name)
    found = run_passes(graph_module, stop_after="page_attention", **context)
    prompts = [tokens(length, seed) for seed, length in enumerate(lengths)]
    for prompt, logits in zip(prompts, Batches(graph_module, found, prompts).whole_prompts(), strict=True):
        torch.testing.assert_close(logits, captured.logits(name, prompt), atol=2e-5, rtol=2e-5)
    return found
