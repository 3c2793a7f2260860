"""recognize_attention: every attention becomes one causal ``chunkc::attention`` whose mask is proven and gone.

Takes three spellings: ``chunkc::attention`` as capture leaves it, ``scaled_dot_product_attention``, and eager
``softmax(q @ k.T * scale + mask) @ v``. The mask tensor is replaced by what it means (window, chunk), which is
proven by evaluating the mask's part of the graph (``mask_meaning``). What it adds to scores beside must be ALiBi, whose
slopes are proven likewise (``position_bias``) and become a constant of the graph. Repeated key/value heads are taken
back to the heads that were repeated.

before::

    %mask   = aten.le(%j, %i)                                   # [1, 1, S, S], and what leads to it
    %k4     = aten.reshape(aten.expand(aten.unsqueeze(%k, 2), [1, 2, 4, S, 64]), [1, 8, S, 64])
    %v4     = ...                                               # the same for v
    %out    = aten.scaled_dot_product_attention(%q, %k4, %v4, %mask, scale=0.125)         # [1, 8, S, 64]

after::

    %att    = chunkc.attention(%q, %k, %v, None, None, None, 0.125, True, 0, 0, 0.0)      # [1, S, 8, 64]
    %out    = aten.permute(%att, [0, 2, 1, 3])
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import fx

from chunkc.errors import UnsupportedModelError
from chunkc.passes.additive_terms import split_terms
from chunkc.passes.attention_meaning import CAUSAL_HINT, NOT_CAUSAL, Proofs, refuse_other_code
from chunkc.passes.attributes import attribute
from chunkc.passes.base import GraphPass, PassContext, PassReport
from chunkc.passes.eager_attention import SCALED_AFTER_MASK, EagerAttention, match_eager
from chunkc.passes.facts import register_fact, require
from chunkc.passes.fx_tools import (
    aten,
    call,
    fake_mode_of,
    is_call,
    rank,
    refuse,
    symbol_of,
    value,
)
from chunkc.passes.propagate import propagate
from chunkc.passes.prove_token_parallel import analyse

#: set on a ``chunkc::attention`` that stands for attention which the model computes itself
_OWN = "chunkc_own_attention"
#: name of the graph's buffers that hold slopes
_SLOPES = "alibi_slopes_"


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
        proofs = Proofs(graph_module, context)
        matches = 0
        for node in list(graph.nodes):
            if is_call(node, aten.scaled_dot_product_attention):
                _replace_sdpa(graph, node)
            elif is_call(node, aten.softmax, aten._softmax):
                found = match_eager(graph_module, node)
                if found is not None:
                    _replace_eager(graph_module, found, proofs)
        graph.eliminate_dead_code()
        propagate(graph_module)
        for node in graph.nodes:
            if is_call(node, torch.ops.chunkc.attention):
                _prove(graph_module, node, proofs)
                matches += 1
        graph.eliminate_dead_code()
        if not matches:
            analyse(graph_module)  # refuses by name whatever mixes tokens in attention's place
            raise UnsupportedModelError("no attention was found in the model; only transformers can be served")
        return PassReport(matches, notes=tuple(proofs.notes()))


def _prove(graph_module: fx.GraphModule, node: fx.Node, proofs: Proofs) -> None:
    """Replace the mask of a ``chunkc::attention`` by its proven meaning."""
    q, k, v, mask, sinks, slopes, scale, causal, window, chunk, softcap = node.args
    _check_shapes(node, q, k, v)
    if mask is None:
        if not causal:
            raise refuse(node, NOT_CAUSAL, CAUSAL_HINT)
        return
    terms = split_terms(graph_module, mask)
    biases = [(bias, 1.0) for bias in terms.biases]
    meaning = proofs.meaning(node, _heads(q), value(q).dtype, terms.masks, biases)
    if (causal or window or chunk) and (meaning.window, meaning.chunk) != (window, chunk):
        raise refuse(node, "attention has a mask tensor and flags that do not say the same")
    if meaning.slopes is not None:
        if node.meta.get(_OWN):
            refuse_other_code(proofs.context)
        if slopes is not None:
            raise refuse(node, "attention has slopes and a position bias in its mask")
        if sinks is not None and not meaning.is_zero_at_own:
            raise refuse(node, "attention has sinks and a position bias that is not 0 at each query's own key")
        slopes = _add_slopes(graph_module, node, meaning.slopes)
    node.args = (q, k, v, None, sinks, slopes, scale, True, meaning.window, meaning.chunk, softcap)


def _add_slopes(graph_module: fx.GraphModule, node: fx.Node, slopes: torch.Tensor) -> fx.Node:
    """The slopes as a buffer of the graph, one for all attentions with the same, before ``node``."""
    name = next(
        name
        for name in (f"{_SLOPES}{number}" for number in itertools.count())
        if not hasattr(graph_module, name) or torch.equal(attribute(graph_module, name), slopes)
    )
    if not hasattr(graph_module, name):
        graph_module.register_buffer(name, slopes)
    with node.graph.inserting_before(node):
        result = node.graph.get_attr(name)
    with fake_mode_of(node.graph):
        result.meta["val"] = torch.empty_like(slopes)
    return result


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


def _replace_eager(graph_module: fx.GraphModule, found: EagerAttention, proofs: Proofs) -> None:
    """Eager attention may mask and add in several steps, which are joined."""
    masks, biases = list(found.masks), []
    for added in found.added:
        terms = split_terms(graph_module, added.node)
        if terms.masks and added.factor != 1:
            raise refuse(added.scaled_by or added.node, SCALED_AFTER_MASK)
        masks += terms.masks
        biases += [(bias, added.factor) for bias in terms.biases]
    meaning = proofs.meaning(found.output, _heads(found.query), value(found.query).dtype, masks, biases)
    if meaning.slopes is not None:
        refuse_other_code(proofs.context)
    graph = graph_module.graph
    with graph.inserting_before(found.output):
        key = _transposed(graph, found.key_transposed, found.output)
        slopes = None if meaning.slopes is None else _add_slopes(graph_module, found.output, meaning.slopes)
        _insert(
            graph,
            found.output,
            found.query,
            key,
            found.value,
            mask=None,
            slopes=slopes,
            scale=found.scale,
            causal=True,
            window=meaning.window,
            chunk=meaning.chunk,
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
    slopes: fx.Node | None = None,
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
        *(query, key, values, mask, None, slopes, float(scale), causal, window, chunk, float(softcap)),
        like=node,
    )
    result.meta[_OWN] = True
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
            require(node.args[3] is None and node.args[7] is True, f"{node.name} has a mask that is not proven")
