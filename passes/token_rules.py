"""For each operator: where the tokens are in its result, given where they are in its inputs.

A rule takes the node and the analysis, and returns a state or raises ``MixesTokens`` with the reason. An operator
without a rule is refused by name; ``token_rule`` adds one:

    @token_rule(torch.ops.mine.norm)
    def _(node, at):
        return at.rowwise(node, dims=[-1])
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

import chunkc.kernels.fused_linear  # noqa: F401  (defines chunkc::fused_linear and chunkc::packed_linear)
from chunkc.passes.fx_tools import aten, is_call, rank, value
from chunkc.passes.token_axis import (
    UNIFORM,
    MixesTokens,
    Several,
    State,
    Tokens,
    Uniform,
    broadcast,
    coefficient,
    reshaped,
)


class Analysis(Protocol):
    """What a rule may ask of the analysis."""

    symbols: tuple[Any, ...]

    def state(self, argument: Any) -> State:
        """State of an argument: of a node, or of a constant (uniform)."""


Rule = Callable[[fx.Node, Analysis], State]

RULES: dict[Any, Rule] = {}

#: dtypes that hold row numbers and expert numbers exactly
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


def token_rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Decorator: use the function as the rule of these operators (overload packets, overloads or functions)."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            RULES[target] = rule
        return rule

    return register


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator: its own, its packet's, or elementwise where torch tags it so."""
    for key in (target, getattr(target, "overloadpacket", None)):
        if key in RULES:
            return RULES[key]
    if torch.Tag.pointwise in getattr(target, "tags", ()):
        return elementwise
    return None


def tensors_in(arguments: Any) -> list[fx.Node]:
    """All nodes in a nested argument."""
    found: list[fx.Node] = []
    fx.node.map_arg(arguments, found.append)
    return found


def elementwise(node: fx.Node, at: Analysis) -> State:
    """Each entry of the result depends on the entries at the same place."""
    operands = tensors_in((node.args, node.kwargs))
    ranks = [rank(n) if isinstance(value(n), torch.Tensor) else 0 for n in operands]
    return broadcast([at.state(n) for n in operands], ranks, rank(node))


def only_tokens(state: State) -> Tokens | None:
    """The state if tokens are in it, None if uniform; anything else may not be computed with."""
    if isinstance(state, Uniform):
        return None
    if not isinstance(state, Tokens):
        raise MixesTokens("it uses numbers that depend on the batch as a whole")
    return state


def keep_out(state: Tokens, dims: Any, ndim: int, what: str) -> None:
    """Refuse an op that works along the token axis."""
    dims = [dims] if isinstance(dims, int) else dims
    if dims is None or len(dims) == 0:
        dims = range(ndim)
    if state.axis in [d % ndim for d in dims]:
        raise MixesTokens(f"it {what} along the dimension that holds the tokens")


@token_rule(
    *(aten.where, aten.__and__, aten.__or__, aten.polar, aten.complex),
    *(aten.multiply, aten.divide, aten.subtract, aten.negative, aten.absolute),  # other names of tagged ones
)
def _elementwise(node: fx.Node, at: Analysis) -> State:
    """Elementwise operators that torch does not tag as such."""
    return elementwise(node, at)


# casts keep what is known of integers


@token_rule(aten._to_copy, aten.to, aten.clone, aten.contiguous, aten.type_as, aten.alias, aten.detach)
def _cast(node: fx.Node, at: Analysis) -> State:
    state = at.state(node.args[0])
    if value(node).dtype in EXACT or isinstance(state, Uniform):
        return state
    state = only_tokens(state)  # counts and orders may not be rounded
    return UNIFORM if state is None else state.plain()


# shapes


@token_rule(operator.mul, operator.add, operator.sub, operator.neg)
def _operators(node: fx.Node, at: Analysis) -> State:
    return elementwise(node, at)


@token_rule(aten.reshape, aten.view, aten._unsafe_view, aten.flatten)
def _reshape(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    return UNIFORM if state is None else reshaped(state, value(node.args[0]).shape, value(node).shape)


@token_rule(aten.permute)
def _permute(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    dims = [d % rank(node) for d in node.args[1]]
    return state.moved(dims.index(state.axis))


@token_rule(aten.transpose, aten.numpy_T, aten.t)
def _transpose(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    dims = list(range(rank(node)))
    if len(node.args) == 3:
        a, b = (d % rank(node) for d in node.args[1:])
        dims[a], dims[b] = dims[b], dims[a]
    else:
        dims.reverse()
    return state.moved(dims.index(state.axis))


@token_rule(aten.unsqueeze)
def _unsqueeze(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    dim = node.args[1] % rank(node)
    return Tokens(
        state.axis + (dim <= state.axis), state.symbol, state.outer, state.inner, state.order, state.index, state.source
    )


@token_rule(aten.squeeze)
def _squeeze(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    before = value(node.args[0]).shape
    dims = node.args[1] if len(node.args) > 1 else [d for d, size in enumerate(before) if size == 1]
    dims = [d % len(before) for d in ([dims] if isinstance(dims, int) else dims)]
    if state.axis in dims:
        raise MixesTokens("it squeezes the dimension that holds the tokens")
    removed = sum(1 for d in dims if d < state.axis and before[d] == 1)
    return Tokens(state.axis - removed, state.symbol, state.outer, state.inner, state.order, state.index, state.source)


@token_rule(aten.expand)
def _expand(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return _created(node, at)
    lifted = state.axis + rank(node) - rank(node.args[0])
    return Tokens(lifted, state.symbol, state.outer, state.inner, state.order, state.index, state.source)


@token_rule(aten.slice)
def _slice(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        if isinstance(_created(node, at), Tokens):
            raise MixesTokens("it takes as many rows of a table as there are tokens, whatever their positions")
        return UNIFORM
    keep_out(state, node.args[1] if len(node.args) > 1 else 0, rank(node), "takes a slice")
    return state.moved(state.axis)


@token_rule(aten.select, aten.unbind)
def _select(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    ndim = rank(node.args[0])
    dim = (node.args[1] if len(node.args) > 1 else 0) % ndim
    result: State = UNIFORM
    if state is not None:
        keep_out(state, dim, ndim, "selects one entry")
        result = state.moved(state.axis - (dim < state.axis))
    many = value(node)
    return Several((result,) * len(many)) if isinstance(many, (tuple, list)) else result


@token_rule(aten.split, aten.split_with_sizes, aten.chunk, aten.tensor_split)
def _split(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is not None:
        dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
        keep_out(state, dim, rank(node.args[0]), "splits")
        state = state.moved(state.axis)
    return Several((state or UNIFORM,) * len(value(node)))


@token_rule(operator.getitem)
def _getitem(node: fx.Node, at: Analysis) -> State:
    state = at.state(node.args[0])
    return state.items[node.args[1]] if isinstance(state, Several) else state


@token_rule(aten.cat, aten.concat)
def _cat(node: fx.Node, at: Analysis) -> State:
    parts = node.args[0]
    dim = node.args[1] if len(node.args) > 1 else 0
    result = broadcast([at.state(p) for p in parts], [rank(p) for p in parts], rank(node))
    if isinstance(result, Tokens):
        keep_out(result, dim, rank(node), "concatenates")
        if any(isinstance(at.state(p), Uniform) for p in parts):
            raise MixesTokens("it concatenates something that is not per token")
    return result


@token_rule(aten.stack)
def _stack(node: fx.Node, at: Analysis) -> State:
    parts = node.args[0]
    result = broadcast([at.state(p) for p in parts], [rank(p) for p in parts], rank(parts[0]))
    if not isinstance(result, Tokens):
        return UNIFORM
    dim = (node.args[1] if len(node.args) > 1 else 0) % rank(node)
    return result.moved(result.axis + (dim <= result.axis))


@token_rule(aten.repeat_interleave)
def _repeat_interleave(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    if not isinstance(node.args[1], int) or dim is None:
        raise MixesTokens("it repeats a number of times that is not constant")
    if dim % rank(node) != state.axis:
        return state.moved(state.axis)
    return Tokens(state.axis, state.symbol, state.outer, state.inner * node.args[1], state.order)


@token_rule(aten.repeat)
def _repeat(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    axis = state.axis + rank(node) - rank(node.args[0])
    times = node.args[1][axis]
    if not isinstance(times, int):
        raise MixesTokens("it repeats the tokens a number of times that is not constant")
    return Tokens(axis, state.symbol, state.outer * times, state.inner, state.order)


# constants


@token_rule(
    aten.full,
    aten.zeros,
    aten.ones,
    aten.new_zeros,
    aten.new_ones,
    aten.new_full,
    aten.scalar_tensor,
    aten.zeros_like,
    aten.ones_like,
    aten.full_like,
    aten.empty_like,
    aten.new_empty,
    aten.empty,
)
def _created(node: fx.Node, at: Analysis) -> State:
    """A constant; along a dimension of the batch's size it holds one equal entry a token."""
    for axis, size in enumerate(value(node).shape):
        for symbol in at.symbols:
            times = coefficient(size, symbol)
            if times is not None:
                return Tokens(axis, symbol, 1, times)
    return UNIFORM


# along dimensions that do not hold tokens


def rowwise(node: fx.Node, at: Analysis, dims: Any, keepdim: bool, what: str) -> State:
    """An op along ``dims`` that removes them unless ``keepdim``."""
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    ndim = rank(node.args[0])
    keep_out(state, dims, ndim, what)
    if keepdim:
        return state.moved(state.axis)
    dims = [dims] if isinstance(dims, int) else dims
    return state.moved(state.axis - sum(1 for d in dims if d % ndim < state.axis))


@token_rule(aten.sum, aten.mean, aten.amax, aten.amin, aten.prod, aten.logsumexp, aten.any, aten.all, aten.argmax)
def _reduce(node: fx.Node, at: Analysis) -> State:
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    keepdim = node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    return rowwise(node, at, dims, bool(keepdim), "reduces")


@token_rule(aten.var, aten.std, aten.var_mean)
def _variance(node: fx.Node, at: Analysis) -> State:
    dims = node.args[1] if len(node.args) > 1 and not isinstance(node.args[1], bool) else node.kwargs.get("dim")
    keepdim = node.kwargs.get("keepdim", node.args[3] if len(node.args) > 3 else False)
    result = rowwise(node, at, dims, bool(keepdim), "takes a variance")
    return Several((result, result)) if isinstance(value(node), (tuple, list)) else result


@token_rule(aten.linalg_vector_norm)
def _norm(node: fx.Node, at: Analysis) -> State:
    dims = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
    keepdim = node.args[3] if len(node.args) > 3 else node.kwargs.get("keepdim", False)
    return rowwise(node, at, dims, bool(keepdim), "takes a norm")


@token_rule(aten.softmax, aten._softmax, aten.log_softmax, aten.cumsum, aten.cumprod, aten.glu)
def _along(node: fx.Node, at: Analysis) -> State:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", -1)
    return rowwise(node, at, dim, True, "runs")


@token_rule(aten.topk, aten.max, aten.min, aten.kthvalue)
def _select_best(node: fx.Node, at: Analysis) -> State:
    if not isinstance(value(node), (tuple, list)):  # max over everything, or of two tensors
        return elementwise(node, at) if len(node.args) > 1 else rowwise(node, at, None, False, "reduces")
    position = 1 if is_call(node, aten.max, aten.min) else 2  # topk and kthvalue take k first
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", -1)
    keepdim = is_call(node, aten.topk) or (node.args[position + 1] if len(node.args) > position + 1 else False)
    result = rowwise(node, at, dim, bool(keepdim), "ranks")
    return Several((result, result))


@token_rule(aten.layer_norm, aten.native_layer_norm, aten.rms_norm)
def _layer_norm(node: fx.Node, at: Analysis) -> State:
    dims = list(range(-len(node.args[1]), 0))
    return rowwise(node, at, dims, True, "normalises")


@token_rule(aten.group_norm)
def _group_norm(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    if state is not None and state.axis != 0:
        raise MixesTokens("it normalises along the dimension that holds the tokens")
    return state or UNIFORM


@token_rule(aten.batch_norm)
def _batch_norm(node: fx.Node, at: Analysis) -> State:
    running_mean, training = node.args[3], node.args[5]
    if training or running_mean is None:
        return _batch_statistics(node, at)
    return elementwise(node, at)


@token_rule(aten._native_batch_norm_legit_no_training)
def _trained_batch_norm(node: fx.Node, at: Analysis) -> State:
    state = only_tokens(at.state(node.args[0]))
    return Several((UNIFORM if state is None else state.plain(), UNIFORM, UNIFORM))


@token_rule(aten._native_batch_norm_legit, aten.instance_norm)
def _batch_statistics(node: fx.Node, at: Analysis) -> State:
    raise MixesTokens("it normalises by statistics of the whole batch")


# products


@token_rule(aten.linear, torch.ops.chunkc.packed_linear)
def _linear(node: fx.Node, at: Analysis) -> State:
    if any(not isinstance(at.state(weight), Uniform) for weight in node.args[1:3]):
        raise MixesTokens("its weight depends on the tokens")
    state = only_tokens(at.state(node.args[0]))
    if state is None:
        return UNIFORM
    keep_out(state, -1, rank(node.args[0]), "multiplies")
    return state.moved(state.axis)


@token_rule(torch.ops.chunkc.fused_linear)
def _fused_linear(node: fx.Node, at: Analysis) -> State:
    product, (norm_weight, residual) = _linear(node, at), (node.args[4], node.args[7])
    if not isinstance(at.state(norm_weight), Uniform):
        raise MixesTokens("its norm's weight depends on the tokens")
    if residual is None:
        return product
    return broadcast([product, at.state(residual)], [rank(node)] * 2, rank(node))


@token_rule(aten.mm, aten.matmul, aten.bmm)
def _matmul(node: fx.Node, at: Analysis) -> State:
    return product(node.args[0], node.args[1], rank(node), at)


@token_rule(aten.addmm, aten.baddbmm)
def _addmm(node: fx.Node, at: Analysis) -> State:
    result = product(node.args[1], node.args[2], rank(node), at)
    return broadcast([at.state(node.args[0]), result], [rank(node.args[0]), rank(node)], rank(node))


def product(left: fx.Node, right: fx.Node, out_rank: int, at: Analysis) -> State:
    """A (batched) matrix product: tokens may be rows of the left, columns of the right, or a batch dimension."""
    a, b = only_tokens(at.state(left)), only_tokens(at.state(right))
    if (a is not None and a.axis == rank(left) - 1) or (b is not None and b.axis == max(0, rank(right) - 2)):
        raise MixesTokens("it sums over the dimension that holds the tokens")
    # a vector on the right takes the last dimension away, a vector on the left the second to last
    a_shift = out_rank - rank(left) + (rank(right) == 1)
    a_out = None if a is None else a.moved(a.axis + a_shift)
    b_shift = out_rank - rank(right) + (rank(left) == 1 and b is not None and b.axis < rank(right) - 1)
    b_out = None if b is None else b.moved(b.axis + b_shift)
    if a_out is not None and b_out is not None and (a_out != b_out or a_out.axis >= out_rank - 2):
        raise MixesTokens("it multiplies every token with every other")
    return a_out or b_out or UNIFORM


@token_rule(aten.embedding, torch.ops.chunkc.packed_rows)
def _embedding(node: fx.Node, at: Analysis) -> State:
    table, numbers = node.args[:2] if is_call(node, aten.embedding) else node.args[1::-1]
    if not isinstance(at.state(table), Uniform):
        raise MixesTokens("its table depends on the tokens")
    state = only_tokens(at.state(numbers))
    return UNIFORM if state is None else state.moved(state.axis)


@token_rule(aten.gather)
def _gather(node: fx.Node, at: Analysis) -> State:
    index = at.state(node.args[2])
    along_tokens = isinstance(index, Tokens) and node.args[1] % rank(node) == index.axis
    if along_tokens and isinstance(at.state(node.args[0]), Uniform):
        return index.moved(index.axis)  # a look-up: each token's numbers pick rows of a table
    result = broadcast([at.state(node.args[0]), at.state(node.args[2])], [rank(node)] * 2, rank(node))
    if isinstance(result, Tokens):
        keep_out(result, node.args[1], rank(node), "gathers")
        if any(isinstance(at.state(argument), Uniform) for argument in (node.args[0], node.args[2])):
            raise MixesTokens("it gathers rows of something that is not per token")
    return result


@token_rule(aten.scatter, aten.scatter_add, aten.scatter_reduce)
def _scatter(node: fx.Node, at: Analysis) -> State:
    operands = [argument for argument in (node.args[0], *node.args[2:]) if isinstance(argument, fx.Node)]
    result = broadcast([at.state(o) for o in operands], [rank(o) for o in operands], rank(node))
    if isinstance(result, Tokens):
        keep_out(result, node.args[1], rank(node), "scatters")
        if any(isinstance(at.state(o), Uniform) for o in operands):
            raise MixesTokens("it scatters something that is not per token")
    return result


@token_rule(aten.slice_scatter, aten.select_scatter)
def _slice_scatter(node: fx.Node, at: Analysis) -> State:
    base, source = only_tokens(at.state(node.args[0])), only_tokens(at.state(node.args[1]))
    if base is None and source is None:
        return UNIFORM
    state = base or source
    if base is None or source is None or base.plain() != source.plain():
        raise MixesTokens("it writes something that is not per token")
    keep_out(state, node.args[2] if len(node.args) > 2 else 0, rank(node), "writes a slice")
    return state.moved(state.axis)


@token_rule(aten.copy)
def _copy(node: fx.Node, at: Analysis) -> State:
    return broadcast([at.state(a) for a in node.args[:2]], [rank(a) for a in node.args[:2]], rank(node))


@token_rule(aten.view_as_complex)
def _as_complex(node: fx.Node, at: Analysis) -> State:
    return rowwise(node, at, [-1], False, "pairs")


@token_rule(aten.view_as_real)
def _as_real(node: fx.Node, at: Analysis) -> State:
    return at.state(node.args[0])


# attention: the one place where tokens meet


@token_rule(torch.ops.chunkc.attention)
def _attention(node: fx.Node, at: Analysis) -> State:
    q, k, v, mask, *per_head = node.args[:6]
    states = [at.state(tensor) for tensor in (q, k, v)]
    if mask is not None or not node.args[7]:
        raise MixesTokens("its mask is not proven causal")
    if not all(isinstance(s, Tokens) and s == states[0].plain() and s.axis == 2 for s in states):
        raise MixesTokens("the sequence of its query, key or value is not the batch's tokens in their order")
    if not all(isinstance(at.state(numbers), Uniform) for numbers in per_head):
        raise MixesTokens("its sinks or slopes depend on the tokens")
    _in_order(states[0])
    return states[0].moved(1)


@token_rule(torch.ops.chunkc.mixed_attention)
def _mixed_attention(node: fx.Node, at: Analysis) -> State:
    rotary = (table for table in node.args[17:19] if table is not None)
    states = [at.state(tensor) for tensor in (*node.args[:3], *rotary)]
    if not all(isinstance(s, Tokens) and s == states[0] and s.axis == 0 for s in states):
        raise MixesTokens("its query, key, value, cosines or sines are not one row a token in the batch's order")
    _in_order(states[0])
    return states[0].moved(0)


def _in_order(state: Tokens) -> None:
    if state.order is not None or state.outer != 1 or state.inner != 1:
        raise MixesTokens("its rows are not one a token in the batch's order")
