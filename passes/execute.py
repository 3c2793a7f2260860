"""Runs the graph of any stage on one prompt, so that stages can be compared: for tests, checks and the bisect.

A stage is recognised by its inputs: a captured graph takes [1, S], a ragged one [T], a paged one pages and batch
metadata too. The inputs are made up by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from chunkc.kernels.tasks import AttentionShape, plan_tasks
from chunkc.passes.fx_tools import is_call, placeholders, value


def run_on_prompt(
    graph_module: fx.GraphModule,
    input_ids: torch.Tensor,
    *,
    page_size: int = 4,
    interpreter: type[fx.Interpreter] = fx.Interpreter,
) -> torch.Tensor:
    """Logits of every token of one prompt.

    Args:
        graph_module: the graph after capture or after any core pass.
        input_ids: int64 [S].
        page_size: tokens per page, where the graph has pages.
        interpreter: class that runs the graph; one of your own can look at every value.

    Returns:
        logits [S, V], in the model's dtype.
    """
    inputs = prompt_inputs(graph_module, input_ids, page_size=page_size)
    with torch.no_grad():
        logits = interpreter(graph_module).run(*inputs)
    logits = logits[0] if isinstance(logits, (tuple, list)) else logits
    return logits.reshape(-1, logits.shape[-1])


def prompt_inputs(graph_module: fx.GraphModule, input_ids: torch.Tensor, *, page_size: int = 4) -> list[torch.Tensor]:
    """Inputs of the graph, in order, for one prompt int64 [S] whose logits are all wanted."""
    length = len(input_ids)
    pages = -(-length // page_size)
    # a table that is not the identity, so that a mix-up of pages shows
    table = torch.arange(pages, dtype=torch.int32).flip(0)
    tokens = torch.arange(length)
    values: dict[str, torch.Tensor] = {
        "input_ids": input_ids,
        "position_ids": tokens,
        "positions": tokens,
        "q_offsets": torch.tensor([0, length], dtype=torch.int32),
        "kv_lens": torch.tensor([length], dtype=torch.int32),
        "page_table": table[None],
        "slot_mapping": table.long()[tokens // page_size] * page_size + tokens % page_size,
        "logits_rows": tokens,
    }
    values.update(_task_tables(graph_module.graph, values, page_size))
    arguments = []
    for name, node in placeholders(graph_module.graph).items():
        fake = value(node)
        if "_pages_" in name:
            arguments.append(torch.empty(pages, fake.shape[1], page_size, fake.shape[3], dtype=fake.dtype))
        elif fake.dim() == 2 and values[name].dim() == 1:
            arguments.append(values[name][None])
        else:
            arguments.append(values[name])
    return arguments


def _task_tables(graph: fx.Graph, values: dict[str, Any], page_size: int) -> dict[str, torch.Tensor]:
    tables: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        if is_call(node, torch.ops.chunkc.mixed_attention) and node.args[9].target not in tables:
            q, k, v = (value(tensor) for tensor in node.args[:3])
            window, chunk = node.args[14:16]
            shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], v.shape[2], window=window, chunk=chunk)
            plan = plan_tasks(values["q_offsets"], values["kv_lens"], shape, page_size=page_size, units=2)
            tables[node.args[9].target], tables[node.args[10].target] = plan.tasks, plan.merges
    return tables
