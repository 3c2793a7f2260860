"""recognize_attention: every attention becomes one causal ``chunkc::attention`` whose mask is proven and gone.

Takes three spellings: ``chunkc::attention`` as capture leaves it, ``scaled_dot_product_attention``, and eager
``softmax(q @ k.T * scale + mask) @ v``. The mask tensor is replaced by what it means (window, chunk), which is
proven by evaluating the mask's part of the graph (``mask_meaning``). Repeated key/value heads are taken back to
the heads that were repeated.

before::

    %mask   = aten.le(%j, %i)                                   # [1, 1, S, S], and what leads to it
    %k4     = aten.reshape(aten.expand(aten.unsqueeze(%k, 2), [1, 2, 4, S, 64]), [1, 8, S, 64])
    %v4     = ...                                               # the same for v
    %out    = aten.scaled_dot_product_attention(%q, %k4, %v4, %mask, scale=0.125)         # [1, 8, S, 64]

after::

    %att    = chunkc.attention(%q, %k, %v, None, None, 0.125, True, 0, 0, 0.0)            # [1, S, 8, 64]
    %out    = aten.permute(%att, [0, 2, 1, 3])
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from chunkc.errors import UnsupportedModelError
from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.eager_attention import EagerAttention, match_eager
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import aten, call, is_call, propagate, rank, refuse, symbol_of, value
from chunkc.passes.mask_meaning import MaskMeaning, prove_mask
from chunkc.passes.prove_token_parallel import analyse

_NOT_CAUSAL = "attention without a causal mask lets tokens see later tokens"
_CAUSAL_HINT = "Only causal attention can be served in chunks."


@dataclass(frozen=True)
class RecognizeAttention(GraphPass):
    """See the module's text. Ensures ``attention_recognized``."""

    name = "recognize_attention"
    requires = ("canonical",)
    ensures = ("attention_recognized",)
    expects_matches = True

    def run(self, graph_module: fx.GraphModule, context: PassContext) -> PassReport:
        """Raises UnsupportedModelError for a mask not proven causal, attention in a form not known, or no attention."""
        graph = graph_module.graph
        proofs = _Proofs(graph_module, context)
        matches = 0
        for node in list(graph.nodes):
            if is_call(node, aten.scaled_dot_product_attention):
                _replace_sdpa(graph, node)
            elif is_call(node, aten.softmax, aten._softmax):
                found = match_eager(graph_module, node)
                if found is not None:
                    _replace_eager(graph, found, proofs)
        graph.eliminate_dead_code()
        propagate(graph_module)
        for node in graph.nodes:
            if is_call(node, torch.ops.chunkc.attention):
                _prove(node, proofs)
                matches += 1
        graph.eliminate_dead_code()
        if not matches:
            analyse(graph_module)  # refuses by name whatever mixes tokens in attention's place
            raise UnsupportedModelError("no attention was found in the model; only transformers can be served")
        return PassReport(matches, notes=tuple(proofs.notes()))


class _Proofs:
    """Proves each mask once, however many layers share it, and keeps what was found."""

    def __init__(self, graph_module: fx.GraphModule, context: PassContext) -> None:
        self.graph_module = graph_module
        self.context = context
        self.found: dict[tuple[fx.Node, bool], MaskMeaning] = {}
        self.hints = set(_sizes_in(context.config))

    def __call__(self, mask: fx.Node, true_means_masked: bool = False) -> MaskMeaning:
        key = (mask, true_means_masked)
        if key not in self.found:
            meaning = prove_mask(
                self.graph_module,
                mask,
                longest=self.context.max_positions,
                hints=self.hints,
                true_means_masked=true_means_masked,
            )
            if meaning.proven_length is not None:
                known = self.context.proven_length
                self.context.proven_length = min(known or meaning.proven_length, meaning.proven_length)
            self.found[key] = meaning
        return self.found[key]

    def notes(self) -> Iterator[str]:
        for (mask, _), meaning in self.found.items():
            kind = "causal"
            if meaning.window:
                kind += f", window {meaning.window}"
            if meaning.chunk:
                kind += f", chunk {meaning.chunk}"
            far = f" (up to {meaning.proven_length} tokens)" if meaning.proven_length else ""
            yield f"mask {mask.name} is proven {kind}{far}"


def _sizes_in(config: Any) -> Iterator[int]:
    """Sizes of windows and chunks that a configuration names."""
    if config is None:
        return
    configs = [config]
    text = getattr(config, "get_text_config", None)
    if callable(text):
        configs.append(text())
    for each in configs:
        for name, size in vars(each).items():
            if isinstance(size, int) and not isinstance(size, bool) and ("window" in name or "chunk" in name):
                yield size


def _prove(node: fx.Node, proofs: _Proofs) -> None:
    """Replace the mask of a ``chunkc::attention`` by its proven meaning."""
    q, k, v, mask, sinks, scale, causal, window, chunk, softcap = node.args
    _check_shapes(node, q, k, v)
    if mask is None:
        if not causal:
            raise refuse(node, _NOT_CAUSAL, _CAUSAL_HINT)
        return
    meaning = proofs(mask)
    if (causal or window or chunk) and (meaning.window, meaning.chunk) != (window, chunk):
        raise refuse(node, "attention has a mask tensor and flags that do not say the same")
    node.args = (q, k, v, None, sinks, scale, True, meaning.window, meaning.chunk, softcap)


def _replace_sdpa(graph: fx.Graph, node: fx.Node) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    if arguments.get("dropout_p"):
        raise refuse(node, "attention applies dropout")
    query = arguments["query"]
    scale = arguments.get("scale")
    if scale is None:
        scale = float(value(query).shape[-1]) ** -0.5
    causal = arguments.get("is_causal", False)
    if isinstance(scale, fx.Node) or isinstance(causal, fx.Node):
        raise refuse(node, "attention whose scale or mask depends on how long the sequence is")
    with graph.inserting_before(node):
        _insert(
            graph,
            node,
            query,
            arguments["key"],
            arguments["value"],
            mask=arguments.get("attn_mask"),
            scale=scale,
            causal=bool(causal),
        )


def _replace_eager(graph: fx.Graph, found: EagerAttention, proofs: _Proofs) -> None:
    """Eager attention may mask in several steps; all of them must mean the same family, and are joined."""
    meanings = [proofs(mask, inverted) for mask, inverted in found.masks]
    if not meanings:
        raise refuse(found.output, _NOT_CAUSAL, _CAUSAL_HINT)
    windows = [m.window for m in meanings if m.window]
    chunks = [m.chunk for m in meanings if m.chunk]
    if len(set(chunks)) > 1:
        raise refuse(found.output, "attention masks with two different chunk sizes")
    with graph.inserting_before(found.output):
        key = _transposed(graph, found.key_transposed, found.output)
        _insert(
            graph,
            found.output,
            found.query,
            key,
            found.value,
            mask=None,
            scale=found.scale,
            causal=True,
            window=min(windows, default=0),
            chunk=chunks[0] if chunks else 0,
            softcap=found.softcap,
        )


def _transposed(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    """``node`` with its last two dimensions swapped; a swap that is there already is undone instead."""
    last_two = {rank(node) - 1, rank(node) - 2}
    if is_call(node, aten.transpose) and {dim % rank(node) for dim in node.args[1:]} == last_two:
        return node.args[0]
    result = call(graph, aten.transpose.int, node, -1, -2, like=like)
    result.meta["val"] = value(node).transpose(-1, -2)
    return result


def _insert(
    graph: fx.Graph,
    node: fx.Node,
    query: fx.Node,
    key: fx.Node,
    values: fx.Node,
    *,
    mask: fx.Node | None,
    scale: float,
    causal: bool,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
) -> None:
    """Put ``chunkc::attention`` in the place of ``node``, which computes [1, H, S, Dv] or [H, S, Dv]."""
    single_key, single_values = _before_repeat(key), _before_repeat(values)
    if single_key is not key and single_values is not values and _heads(single_key) == _heads(single_values):
        key, values = single_key, single_values
    flat = rank(query) == 3
    _check_shapes(node, query, key, values)
    if flat:
        query, key, values = (call(graph, aten.unsqueeze.default, t, 0, like=node) for t in (query, key, values))
    result = call(
        graph,
        torch.ops.chunkc.attention.default,
        *(query, key, values, mask, None, float(scale), causal, window, chunk, float(softcap)),
        like=node,
    )
    result = call(graph, aten.permute.default, result, [0, 2, 1, 3], like=node)
    if flat:
        result = call(graph, aten.squeeze.dim, result, 0, like=node)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _check_shapes(node: fx.Node, *tensors: fx.Node) -> None:
    """Refuse what ``chunkc::attention`` would compute otherwise: broadcast heads, several sequences."""
    for tensor in tensors:
        if rank(tensor) not in (3, 4) or rank(tensor) != rank(tensors[0]):
            raise refuse(node, "attention whose query, key and value are not all [1, H, S, D] or all [H, S, D]")
        if symbol_of(value(tensor).shape[-2]) is None:
            raise refuse(node, "attention whose second to last dimension is not the sequence")
        if rank(tensor) == 4 and value(tensor).shape[0] != 1:
            raise refuse(node, "attention over more than one sequence at a time")
    if len({symbol_of(value(tensor).shape[-2]) for tensor in tensors}) > 1:
        raise refuse(node, "attention whose query, key and value are not equally long")
    query_heads, key_heads, value_heads = (_heads(tensor) for tensor in tensors)
    if key_heads != value_heads or query_heads % key_heads:
        raise refuse(node, f"attention of {query_heads} query, {key_heads} key and {value_heads} value heads")


def _heads(tensor: fx.Node) -> int:
    return value(tensor).shape[-3]


def _before_repeat(node: fx.Node) -> fx.Node:
    """Key/value heads [1, Hkv, S, D] before each was repeated for its group of query heads, where they were."""
    if is_call(node, aten.repeat_interleave.self_int) and rank(node) == 4 and node.args[2:3] in ((1,), (-3,)):
        return node.args[0]
    if not is_call(node, aten.reshape) or rank(node) != 4:
        return node
    source = node.args[0]
    if is_call(source, aten.clone):
        source = source.args[0]
    if not is_call(source, aten.expand) or rank(source) != 5:
        return node
    before = source.args[0]
    if not is_call(before, aten.unsqueeze) or before.args[1] not in (2, -3):
        return node
    original = before.args[0]
    _, heads, repeats, *rest = value(source).shape
    merged = list(value(node).shape)
    if merged[1] != heads * repeats or [symbol_of(s) or s for s in merged[2:]] != [symbol_of(s) or s for s in rest]:
        return node
    return original if value(original).shape[1] == heads else node


@register_fact("attention_recognized")
def check_attention_recognized(graph_module: fx.GraphModule, context: PassContext) -> None:
    """No SDPA is left, and each ``chunkc::attention`` is causal by flag and carries no mask tensor."""
    for node in graph_module.graph.nodes:
        require(not is_call(node, aten.scaled_dot_product_attention), f"{node.name} is an SDPA call")
        if is_call(node, torch.ops.chunkc.attention):
            require(node.args[3] is None and node.args[6] is True, f"{node.name} has a mask that is not proven")
