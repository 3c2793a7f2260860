"""prove_token_parallel: what it accepts treats each token by itself (shown by running it), what mixes is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from chunkc import compat
from chunkc.errors import UnsupportedModelError
from chunkc.passes.canonicalize import Canonicalize
from chunkc.passes.fx_tools import output_node
from chunkc.passes.prove_token_parallel import ProveTokenParallel, analyse
from chunkc.passes.token_axis import Tokens
from chunkc.passes.token_rules import RULES, token_rule

from .graphs import VOCAB, WIDTH, Captured, Cases, count_ops, drawn, refused, run_pass, tokens

_library = torch.library.Library("chunkc_tests", "DEF")
_library.define("halve(Tensor x) -> Tensor")
_library.impl("halve", lambda x: x / 2, "CompositeExplicitAutograd")
torch.library.register_fake("chunkc_tests::halve", torch.empty_like, lib=_library)


def _size(at: SimpleNamespace) -> int:
    return at.x.shape[1]


def _written(at: SimpleNamespace) -> torch.Tensor:
    y = at.x.clone()
    y[..., 0] = at.x[..., 1]
    return y


def _heads(at: SimpleNamespace) -> torch.Tensor:
    """Attention between the heads of one token."""
    heads = at.x.view(1, _size(at), 3, 4)
    return ((heads @ heads.transpose(-1, -2)).softmax(-1) @ heads).reshape(1, _size(at), WIDTH)


ACCEPTED = {
    "elementwise": lambda at: F.gelu(at.x) * at.x.sigmoid() + 1.0,
    "layer_norm": lambda at: F.layer_norm(at.x, (WIDTH,)),
    "rms_norm": lambda at: F.rms_norm(at.x, (WIDTH,)),
    "linear": lambda at: at.linear(at.x),
    "matmul_weight": lambda at: at.x @ at.square,
    "matmul_flat": lambda at: (at.x.view(-1, WIDTH) @ at.square).view(1, -1, WIDTH),
    "addmm": lambda at: torch.addmm(at.vector, at.x.view(-1, WIDTH), at.square).view(1, -1, WIDTH),
    "matmul_vector": lambda at: at.x * (at.x @ at.vector).unsqueeze(-1),
    "batch_norm_trained": lambda at: at.trained_norm(at.x.transpose(1, 2)).transpose(1, 2),
    "group_norm_rows": lambda at: F.group_norm(at.x.view(-1, WIDTH), 3).view(1, -1, WIDTH),
    "variance": lambda at: at.x / (at.x.var(-1, keepdim=True) + 1),
    "norm": lambda at: F.normalize(at.x, dim=-1),
    "heads": _heads,
    "split_and_join": lambda at: torch.cat([part.tanh() for part in at.x.split(4, -1)], -1),
    "stack": lambda at: torch.stack([at.x, -at.x], 1).amax(1),
    "glu": lambda at: F.glu(torch.cat([at.x, at.x], -1), -1),
    "running_sum_of_features": lambda at: at.x.cumsum(-1),
    "sorted_features": lambda at: at.x.sort(-1, descending=True).values,
    "second_smallest_feature": lambda at: at.x * at.x.kthvalue(2, dim=-1, keepdim=True).values,
    "top_features": lambda at: torch.zeros_like(at.x).scatter(2, at.x.topk(2, -1).indices, 1.0) * at.x,
    "looked_up": lambda at: at.x * at.table[None].gather(1, at.ids[..., None].expand(-1, -1, WIDTH)),
    "best_feature": lambda at: at.x * at.x.gather(2, at.x.argmax(-1, keepdim=True)),
    "own_row": lambda at: at.x * (at.x[0][torch.arange(_size(at)), at.ids[0] % WIDTH])[None, :, None],
    "two_rows_a_token": lambda at: at.x.view(1, -1, 6).softmax(-1).view(1, -1, WIDTH),
    "repeated_rows": lambda at: at.x.repeat_interleave(2, 1).view(1, -1, 2, WIDTH).sum(2),
    "repeated_tokens": lambda at: at.x[0].repeat(3, 1).view(3, -1, WIDTH).mul(at.three).sum(0)[None],
    "repeated_features": lambda at: at.x.repeat(1, 1, 2)[..., :WIDTH],
    "table_by_token": lambda at: at.x * at.table[at.ids],
    "angles": lambda at: at.x * (at.positions[..., None].float() * at.vector).cos(),
    "write_feature": _written,
    "ones_of_the_size": lambda at: at.x * torch.ones(1, _size(at), 1),
    "floor": lambda at: torch.div(at.x, 2, rounding_mode="floor"),
    "bits": lambda at: at.x.view(torch.int32).view(torch.float32) * 2,
}
_MANY = "more than one place"
_COUNT = "computed from the number of tokens"
#: function, reason, operator
REFUSED = {
    "convolution": (lambda at: at.convolution(at.x.transpose(1, 2)).transpose(1, 2), "does not know", "aten.conv1d"),
    "depthwise": (
        lambda at: at.depthwise(at.x.transpose(1, 2))[..., : _size(at)].transpose(1, 2),
        "does not know",
        "aten.conv1d",
    ),
    "running_sum": (lambda at: at.x.cumsum(1), "sums up along", "aten.cumsum"),
    "running_product": (lambda at: at.x.cumprod(1), "runs along", "aten.cumprod"),
    "mean": (lambda at: at.x - at.x.mean(1, keepdim=True), "reduces along", "aten.mean"),
    "mean_of_all": (lambda at: at.x - at.x.mean(), "reduces along", "aten.mean"),
    "maximum": (lambda at: at.x * at.x.amax(1, keepdim=True), "reduces along", "aten.amax"),
    "maximum_and_place": (lambda at: at.x * at.x.max(1, keepdim=True).values, "ranks along", "aten.max"),
    "third_smallest": (lambda at: at.x * at.x.kthvalue(3, dim=1, keepdim=True).values, "ranks along", "aten.kthvalue"),
    "any": (lambda at: at.x * (at.x > 0).any(1, keepdim=True), "reduces along", "aten.any"),
    "variance": (lambda at: at.x / (at.x.var(1, keepdim=True) + 1), "variance along", "aten.var"),
    "deviation_of_all": (lambda at: at.x / at.x.std(), "variance along", "aten.std"),
    "norm": (lambda at: at.x / at.x.norm(dim=1, keepdim=True), "norm along", "aten.linalg_vector_norm"),
    "softmax": (lambda at: at.x.softmax(1), "runs along", "aten.softmax"),
    "batch_statistics": (
        lambda at: at.batch_norm(at.x.transpose(1, 2)).transpose(1, 2),
        "statistics of the whole batch",
        "aten._native_batch_norm_legit",
    ),
    "instance_norm": (
        lambda at: F.instance_norm(at.x.transpose(1, 2)).transpose(1, 2),
        "statistics of the whole batch",
        "aten.instance_norm",
    ),
    "group_norm": (lambda at: F.group_norm(at.x.transpose(1, 2), 3).transpose(1, 2), "normalises", "aten.group_norm"),
    "shift": (
        lambda at: at.x + torch.cat([torch.zeros_like(at.x[:, :1]), at.x[:, :-1]], 1),
        "takes a slice along",
        "aten.slice",
    ),
    "shift_by_roll": (lambda at: at.x + at.x.roll(1, 1), "does not know", "aten.roll"),
    "flip": (lambda at: at.x.flip(1), "does not know", "aten.flip"),
    "last_token": (lambda at: at.x + at.x[:, -1:], "takes a slice along", "aten.slice"),
    "first_token": (lambda at: at.x + at.x[:, 0].unsqueeze(1), "selects one entry", "aten.select"),
    "token_by_number": (lambda at: at.x + at.x[:, at.first], "rows of other tokens", "aten.index"),
    "token_by_token": (lambda at: at.x[:, at.ids[0] % 2], "rows of other tokens", "aten.index"),
    "neighbour": (lambda at: at.x[:, (torch.arange(_size(at)) - 1).clamp(0)], "rows of other tokens", "aten.index"),
    "row_by_narrow_number": (
        lambda at: at.x[:, torch.arange(_size(at)).to(torch.int8).long()],  # wraps at 128
        "rows of other tokens",
        "aten.index",
    ),
    "gathered": (
        lambda at: at.x.gather(1, at.ids[..., None].expand(-1, -1, WIDTH) % 2),
        "gathers along",
        "aten.gather",
    ),
    "scattered": (
        lambda at: torch.zeros_like(at.x).scatter(1, at.ids[..., None].expand(-1, -1, WIDTH) % 2, at.x) + at.x,
        "scatters along",
        "aten.scatter",
    ),
    "written": (
        lambda at: at.x.index_put((at.first, at.ids[0] % 2), at.x[0]),
        "places that depend on the tokens",
        "aten.index_put",
    ),
    "chosen": (lambda at: at.x * at.x[at.x > 0].sum(), "by a condition", "aten.index"),
    "sorted": (lambda at: at.x.sort(1).values, "sorts tokens", "aten.sort"),
    "ranked": (lambda at: at.x[:, at.ids[0].argsort()], "not one row of logits", "aten.index"),
    "tokens_times_tokens": (
        lambda at: (at.x @ at.x.transpose(1, 2)) @ at.x,
        "every token with every other",
        "aten.matmul",
    ),
    "sum_by_ones": (lambda at: torch.ones(1, 1, _size(at)) @ at.x + at.x, "sums over", "aten.matmul"),
    "sum_of_scores": (
        lambda at: at.x * (at.x @ at.vector).sum(1)[:, None, None].transpose(0, 1),
        "reduces along",
        "aten.sum",
    ),
    "regrouped": (lambda at: at.x.transpose(1, 2).reshape(1, _size(at), WIDTH), "regroups", "aten.reshape"),
    "regrouped_halves": (
        lambda at: at.x.view(1, 2 * _size(at), 6).view(1, 2, _size(at), 6).sum(1).repeat(1, 1, 2),
        "regroups",
        "aten.reshape",
    ),
    "regrouped_rows": (lambda at: at.x.view(1, 2 * _size(at), 6).softmax(1).view(1, -1, WIDTH), "runs", "aten.softmax"),
    "repeated": (lambda at: at.x.repeat(1, 2, 1).view(1, _size(at), -1)[..., :WIDTH], "regroups", "aten.reshape"),
    # the number of tokens, taken as a number
    "divided_by_count": (lambda at: at.x / _size(at), _COUNT, "aten.div"),
    "scaled_by_root_of_count": (lambda at: at.x * _size(at) ** -0.5, _COUNT, "aten.mul"),
    "count_as_filler": (lambda at: at.x / torch.full((1, 1, 1), _size(at)), _COUNT, "aten.full"),
    "count_as_new_filler": (lambda at: at.x / at.x.new_full((1, 1, 1), _size(at)), _COUNT, "aten.new_full"),
    "count_as_scalar": (lambda at: at.x / torch.scalar_tensor(_size(at)), _COUNT, "aten.scalar_tensor"),
    "count_as_start": (lambda at: at.x * torch.arange(_size(at), _size(at) + WIDTH), _COUNT, "aten.arange"),
    "count_as_index": (lambda at: at.x * at.table[_size(at) - 1], _COUNT, "aten.select"),
    "count_as_slice": (lambda at: at.x * at.table.narrow(0, _size(at) - 1, 1), _COUNT, "aten.slice"),
    "count_as_bound": (lambda at: at.x.clamp(max=_size(at)), _COUNT, "aten.clamp"),
    "is_last": (lambda at: at.x * (torch.arange(_size(at)) == _size(at) - 1)[:, None], _COUNT, "aten.eq"),
    "count_of_ones": (lambda at: at.x / torch.ones(_size(at), _size(at)).sum(-1)[:, None], _MANY, "aten.ones"),
    "count_by_expand": (
        lambda at: at.x / at.x.new_ones(1, 1).expand(_size(at), _size(at)).sum(-1)[:, None],
        _MANY,
        "aten.expand",
    ),
    "tokens_by_expand": (lambda at: at.x[:, None].expand(-1, _size(at), -1, -1).sum(1), _MANY, "aten.expand"),
    "differences": (
        lambda at: at.x * (at.positions[0][:, None] - at.positions[0][None, :]).sum(-1)[:, None],
        "different dimensions",
        "aten.sub",
    ),
    "table_rows": (lambda at: at.x * at.table[: _size(at)], "takes as many rows|not a multiple", "aten.slice"),
    "unknown": (lambda at: torch.ops.chunkc_tests.halve(at.x), "does not know", "chunkc_tests.halve"),
}


@pytest.fixture(scope="module")
def captured() -> Captured:
    functions = {f"ok_{name}": function for name, function in ACCEPTED.items()}
    functions |= {name: case[0] for name, case in REFUSED.items()}
    trained_norm = nn.BatchNorm1d(WIDTH)
    trained_norm.running_mean.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    members = {
        "linear": nn.Linear(WIDTH, WIDTH),
        "square": nn.Parameter(drawn(WIDTH, WIDTH)),
        "vector": nn.Parameter(drawn(WIDTH)),
        "table": nn.Parameter(drawn(VOCAB, WIDTH)),
        "convolution": nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
        "depthwise": nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH),
        "trained_norm": trained_norm,
        "batch_norm": nn.BatchNorm1d(WIDTH, track_running_stats=False),
        "first": torch.tensor([0]),
        "three": torch.tensor([1.0, 2.0, 4.0])[:, None, None],
    }
    return Captured(Cases(functions, **members))


def _canonical(captured: Captured, name: str) -> fx.GraphModule:
    graph_module = captured.graph(name)
    run_pass(Canonicalize(), graph_module)
    return graph_module


def _prove(graph_module: fx.GraphModule) -> int:
    with compat.one_graph_for_every_size():
        report = ProveTokenParallel().run(graph_module, None)
    return report.matches


def _run(graph_module: fx.GraphModule, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return fx.Interpreter(graph_module).run(ids[None], positions[None])[0]


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_graphs_treat_each_token_by_itself(captured: Captured, name: str) -> None:
    graph_module = _canonical(captured, f"ok_{name}")
    before = count_ops(graph_module)
    assert _prove(graph_module) > 0
    assert count_ops(graph_module) == before  # an analysis changes nothing
    ids, positions = tokens(17), torch.arange(17)
    whole = _run(graph_module, ids, positions)
    torch.testing.assert_close(whole, captured.logits(f"ok_{name}", ids))
    parts = [_run(graph_module, ids[part], positions[part]) for part in (slice(1), slice(1, 4), slice(4, 17))]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_mixing_is_refused_by_op_and_module(captured: Captured, name: str) -> None:
    _, reason, op = REFUSED[name]
    graph_module = _canonical(captured, name)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        _prove(graph_module)
    assert caught.value.op.startswith(op)
    assert caught.value.module in (name, "convolution", "depthwise", "batch_norm")


def test_refusal_names_the_innermost_module(captured: Captured) -> None:
    with refused("does not know", op="aten.conv1d.default", module="convolution"):
        _prove(_canonical(captured, "convolution"))


def test_a_rule_makes_an_operator_known(captured: Captured) -> None:
    graph_module = _canonical(captured, "unknown")
    with refused("token_rule", op="chunkc_tests.halve", module="unknown"):
        _prove(graph_module)
    packet = torch.ops.chunkc_tests.halve
    token_rule(packet)(lambda node, at: at.state(node.args[0]))
    try:
        assert _prove(graph_module) > 0
        # a rule that is wrong about shapes is not believed
        token_rule(packet)(lambda node, at: Tokens(0, at.symbols[0]))
        with refused("does not hold the tokens", op="chunkc_tests.halve", module="unknown"):
            _prove(graph_module)
    finally:
        del RULES[packet]


def test_states_say_where_the_tokens_are(captured: Captured) -> None:
    graph_module = _canonical(captured, "ok_two_rows_a_token")
    with compat.one_graph_for_every_size():
        states = analyse(graph_module)
    (softmax,) = [node for node in graph_module.graph.nodes if "softmax" in node.name]
    assert (states[softmax].axis, states[softmax].outer, states[softmax].inner) == (1, 1, 2)
    assert states[output_node(graph_module.graph)].axis == 1


@pytest.mark.parametrize("swapped", [True, False])
def test_output_must_be_one_row_of_logits_a_token(swapped: bool) -> None:
    function = (lambda at: at.x.transpose(1, 2)) if swapped else (lambda at: at.x.view(1, -1, WIDTH // 2))
    graph_module = _canonical(Captured(Cases({"out": function})), "out")
    with pytest.raises(UnsupportedModelError, match="not one row of logits a token"):
        _prove(graph_module)
