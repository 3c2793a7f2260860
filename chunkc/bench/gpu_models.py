"""Models with random weights, and engines that run them on a device op by op, for ``bench gpu``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from chunkc.on_device import Ready
    from chunkc.runtime.engine import Engine
    from chunkc.runtime.machine import Machine
    from chunkc.runtime.runner import GraphRunner

_PAGE_SIZE = 16

#: as Llama 3.2 1B
LARGE = {
    "vocab_size": 128_256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
#: for equality with HuggingFace: what it computes is independent of the size
SMALL = {
    "vocab_size": 1009,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
#: for trying the program itself out
TINY = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True)
class Placed:
    """A model on a machine.

    Attributes:
        engine: serves it.
        runner: the engine's.
        model: HuggingFace's, on the CPU.
    """

    engine: Engine
    runner: GraphRunner
    model: Any


@functools.lru_cache(maxsize=1)  # a model need not be captured again for the next part of the program
def _prepare(sizes: tuple[tuple[str, Any], ...], dtype: torch.dtype, device: torch.device) -> tuple[Any, Ready]:
    from chunkc import on_device

    model = _build(dict(sizes), dtype, device)
    return model, on_device.prepare(model)


def _build(sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
    """A Llama on the CPU with weights so large that each token seen matters; drawn on ``device``, which is faster."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.normal_(std=1.5 / parameter.shape[1] ** 0.5)
                else:
                    parameter.normal_(mean=1.0, std=0.2)
    return model.to("cpu")


def place(sizes: dict[str, Any], dtype: torch.dtype, machine: Machine, *, tokens: int, max_requests: int) -> Placed:
    """A Llama of these sizes and an engine for it on a machine, with a cache for so many tokens.

    Raises:
        UnsupportedModelError: the model cannot be captured.
        CapacityError: the cache does not fit.
    """
    from chunkc import on_device
    from chunkc.config import EngineConfig
    from chunkc.kernels import cpu_backend
    from chunkc.runtime.engine import Engine
    from chunkc.runtime.runner import GraphRunner

    if machine.device.type == "cpu":
        cpu_backend.load(dtype)
    model, work = _prepare(tuple(sizes.items()), dtype, machine.device)
    prepared = work.prepared
    runner = GraphRunner(
        on_device.move(work.graph, machine.device),
        prepared.layers,
        vocab_size=prepared.vocab_size,
        max_positions=prepared.longest,
        page_size=_PAGE_SIZE,
        num_pages=-(-tokens // _PAGE_SIZE) + max_requests,
        machine=machine,
    )
    engine = Engine(runner, config=EngineConfig(max_requests=max_requests))
    return Placed(engine, runner, model)


def record_decodes(placed: Placed, machine: Any, *, sizes: list[int], longest: int, divisions: list[Any]) -> None:
    """Records decode steps as CUDA graphs, on the whole machine's stream and on the decodes' of each division."""
    from chunkc.runtime.decode_graphs import DecodeGraphs

    runner = placed.runner
    graphs = DecodeGraphs(
        runner,
        runner.layers,
        sizes=sizes,
        longest=longest,
        units=machine.num_sms,
        stream=lambda: machine.current,
    )
    with machine.active():
        graphs.record()
    for division in divisions:
        lanes = machine.lanes(division)
        lanes[0].submit(graphs.record).result()
        for lane in lanes:
            lane.close()
    runner.decode_graphs = graphs
