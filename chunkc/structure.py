"""What a graph is, as text: two graphs with the same text compute the same of their inputs.

The text holds every operator with its overload, every constant with its type, and every tensor's dtype, sizes,
strides and device; it leaves out names and where the code came from. Dynamic sizes are numbered as they appear, with
the range they may take. So it serves as the proof that two layers are alike, and as a key for compiled artifacts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from chunkc.passes.fx_tools import fake_mode_of, value


def describe(graph: fx.Graph) -> str:
    """Text of a graph whose nodes have fake values and which has no attributes.

    Raises:
        ValueError: the graph holds a constant that text cannot tell from others.
    """
    return _Description(graph).text()


class _Description:
    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._environment = fake_mode_of(graph).shape_env
        self._numbers: dict[fx.Node, int] = {}
        self._symbols: dict[Any, str] = {}
        self._ranges: list[str] = []

    def text(self) -> str:
        lines = []
        for node in self._graph.nodes:
            if node.op not in ("placeholder", "call_function", "output"):
                raise ValueError(f"the graph holds a {node.op} node")
            self._numbers[node] = len(self._numbers)
            arguments = "" if node.op == "placeholder" else self._argument((node.args, node.kwargs))
            target = self._target(node) if node.op == "call_function" else node.op
            lines.append(f"{target}{arguments} -> {self._value(value(node))}")
        return "\n".join([*lines, *self._ranges])

    def _target(self, node: fx.Node) -> str:
        if isinstance(node.target, torch._ops.OpOverload):
            return str(node.target)
        module, name = getattr(node.target, "__module__", None), getattr(node.target, "__qualname__", None)
        if module is None or name is None or "<locals>" in name or "<lambda>" in name:
            raise ValueError(f"{node.target} has no name")
        return f"{module}.{name}"

    def _argument(self, argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return f"%{self._numbers[argument]}"
        if isinstance(argument, (tuple, list)):
            return f"[{', '.join(map(self._argument, argument))}]"
        if isinstance(argument, dict):
            return f"{{{', '.join(f'{key}: {self._argument(item)}' for key, item in sorted(argument.items()))}}}"
        if isinstance(argument, slice):
            return f"slice({self._argument([argument.start, argument.stop, argument.step])})"
        plain = (int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
        if argument is None or argument is ... or isinstance(argument, plain):  # bool is an int
            return f"{type(argument).__name__} {argument!r}"
        if isinstance(argument, (torch.SymInt, torch.SymFloat)):
            return self._size(argument)
        raise ValueError(f"a constant of type {type(argument).__name__}")

    def _value(self, found: Any) -> str:
        if isinstance(found, torch.Tensor):
            sizes, strides = (", ".join(map(self._size, x)) for x in (found.shape, found.stride()))
            offset = self._size(found.storage_offset())
            return f"{found.dtype} {found.device} [{sizes}] strides [{strides}] offset {offset}"
        if isinstance(found, (tuple, list)):
            return f"({', '.join(map(self._value, found))})"
        return self._size(found)

    def _size(self, size: Any) -> str:
        if not isinstance(size, (torch.SymInt, torch.SymFloat)):
            return repr(size)
        expression = size.node.expr
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._symbols:
                name = f"n{len(self._symbols)}"
                self._symbols[symbol] = name
                found = self._environment.var_to_range.get(symbol)
                self._ranges.append(f"{name} from {getattr(found, 'lower', None)} to {getattr(found, 'upper', None)}")
        names = {symbol: type(symbol)(self._symbols[symbol], integer=True) for symbol in expression.free_symbols}
        return str(expression.xreplace(names))
