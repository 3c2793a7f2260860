"""Names the first module of a model whose output a graph does not compute right."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from chunkc.check import row_errors
from chunkc.model_call import logits_of
from chunkc.passes.execute import run_on_prompt
from chunkc.passes.fx_tools import absorbed_modules, module_path


class _LayerOutputs(fx.Interpreter):
    """Keeps, for every module, the last value computed in it or in a module below it: also where a residual is added to
    it in the same call."""

    outputs: dict[str, torch.Tensor]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        type(self).outputs = {}
        return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        absorbed = absorbed_modules(n)
        if absorbed:
            *operands, _residual = self.fetch_args_kwargs_from_env(n)[0]
            type(self).outputs.update(dict.fromkeys(absorbed, n.target(*operands, None)))
        if n.op == "call_function" and isinstance(result, torch.Tensor) and result.is_floating_point():
            parts = module_path(n).split(".")
            for count in range(1, len(parts) + 1):
                type(self).outputs[".".join(parts[:count])] = result
        return result


def first_difference(
    graph_module: fx.GraphModule, reference: nn.Module, prompt: torch.Tensor, tolerance: float
) -> str | None:
    """Path of the first module, in execution order, whose output differs; None where only batching does it.

    Args:
        graph_module: the graph before compilation, over its weights.
        reference: the untouched model.
        prompt: int64 [S].
        tolerance: error of a row, relative to its spread, that is no difference.
    """
    expected: dict[str, list[torch.Tensor]] = {}

    def keep(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs = output if isinstance(output, tuple) else (output,)
            tensors = [o for o in outputs if isinstance(o, torch.Tensor) and o.is_floating_point()]
            # a copy, since what follows may add to it in place
            expected[path] = [tensor.detach().clone().reshape(-1, tensor.shape[-1]) for tensor in tensors]

        return hook

    hooks = [module.register_forward_hook(keep(path)) for path, module in reference.named_modules() if path]
    try:
        with torch.no_grad():
            logits_of(reference, prompt[None], torch.arange(len(prompt))[None])
            run_on_prompt(graph_module, prompt, interpreter=_LayerOutputs)
    finally:
        for hook in hooks:
            hook.remove()
    for path, outputs in expected.items():
        ours = _LayerOutputs.outputs.get(path)
        if ours is None:
            continue
        # the last value computed in a module may be any of its outputs (a rotary embedding's sine)
        errors = [row_errors(ours.reshape(o.shape), o) for o in outputs if o.numel() == ours.numel()]
        if errors and not any(bool((error <= tolerance).all()) for error in errors):
            return path
    return None
