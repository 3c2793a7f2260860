"""``chunkc::attention``, and what torch's compiler needs to know about both operators."""

from __future__ import annotations

import ast

import pytest
import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch._inductor.utils import run_and_get_code

from chunkc.kernels import cpu_backend, ops
from chunkc.kernels.cases import MixedCase, make_case, tolerance
from chunkc.kernels.tasks import AttentionShape

from .oracle import attend

NEUTRAL = {"mask": None, "sinks": None, "alibi_slopes": None, "causal": True, "window": 0, "chunk": 0, "softcap": 0.0}


def qkv(heads: int = 4, kv_heads: int = 2, seq: int = 13, qk: int = 16, v: int = 24, batch: int = 2) -> tuple:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(batch, h, seq, d, generator=generator) for h, d in ((heads, qk), (kv_heads, qk), (kv_heads, v))
    )


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **changes: object) -> torch.Tensor:
    o = {**NEUTRAL, "scale": q.shape[-1] ** -0.5, **changes}
    names = ("mask", "sinks", "alibi_slopes", "scale", "causal", "window", "chunk", "softcap")
    return ops.attention(q, k, v, *(o[name] for name in names))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: object) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).transpose(1, 2)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_equals_sdpa(causal: bool, heads: int, kv_heads: int) -> None:
    q, k, v = qkv(heads, kv_heads)
    got = run(q, k, v, causal=causal)
    assert got.is_contiguous()
    torch.testing.assert_close(got, sdpa(q, k, v, is_causal=causal))


def test_scale_is_taken_as_given() -> None:
    q, k, v = qkv()
    torch.testing.assert_close(run(q, k, v, scale=0.37), sdpa(q, k, v, is_causal=True, scale=0.37))


def test_bool_and_additive_masks_equal_sdpa() -> None:
    q, k, v = qkv()
    keep = torch.rand(2, 1, 13, 13) > 0.3
    keep[..., 0] = True
    torch.testing.assert_close(run(q, k, v, mask=keep, causal=False), sdpa(q, k, v, attn_mask=keep))
    bias = torch.randn(4, 1, 13)
    torch.testing.assert_close(run(q, k, v, mask=bias, causal=False), sdpa(q, k, v, attn_mask=bias))


SLOPES = torch.tensor([0.5, 0.25, -0.125, 2.0])


@pytest.mark.parametrize(
    "features",
    [
        {"window": 4},
        {"chunk": 5},
        {"softcap": 3.0},
        {"window": 6, "chunk": 8},
        {"alibi_slopes": SLOPES},
        {"alibi_slopes": SLOPES, "window": 4, "softcap": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_features_agree_with_the_oracle(features: dict, with_sinks: bool) -> None:
    q, k, v = qkv()
    sinks = torch.randn(4) if with_sinks else None
    got = run(q, k, v, sinks=sinks, **features)
    for b in range(2):
        rows = [x[b].transpose(0, 1) for x in (q, k, v)]
        want = attend(*rows, 0, scale=0.25, sinks=sinks, **features)
        torch.testing.assert_close(got[b].double(), want, **tolerance(torch.float32))


def test_alibi_equals_an_additive_mask() -> None:
    """Up to what is the same for all keys of a query, so ``slope * key`` is ALiBi too."""
    q, k, v = qkv()
    bias = SLOPES[:, None, None] * torch.arange(13)
    torch.testing.assert_close(run(q, k, v, alibi_slopes=SLOPES), run(q, k, v, mask=bias))


def test_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v = qkv()
    mask = torch.ones(13, 13, dtype=torch.bool).tril()
    mask[3] = False
    out = run(q, k, v, mask=mask, causal=False)
    assert not out[:, 3].any() and out[:, 4].any() and out.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_only_the_result(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv())
    got = run(q, k, v)
    assert got.dtype == dtype
    torch.testing.assert_close(got, run(q.float(), k.float(), v.float()).to(dtype), rtol=0, atol=0)


def test_opcheck_attention() -> None:
    q, k, v = qkv()
    sinks, mask = torch.randn(4), torch.ones(13, 13, dtype=torch.bool).tril()
    torch.library.opcheck(ops.attention, (q, k, v, mask, sinks, torch.rand(4), 0.25, True, 4, 0, 5.0))


@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck_mixed_attention(sinks: bool) -> None:
    assert cpu_backend.load()
    case = make_case([4, 1], [50, 70], AttentionShape(4, 2, 16, 24, window=30), sinks=sinks, alibi=sinks)
    args = case.arguments(case.plan(kv_split=16))
    # The checks compare tensors before and after, which NaN would break.
    args = tuple(a.nan_to_num() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    torch.library.opcheck(ops.mixed_attention, args)


def test_importing_the_operators_again_changes_nothing() -> None:
    import importlib

    before = ops.mixed_attention
    assert importlib.import_module("chunkc.kernels.ops").mixed_attention is before


class TwoLayers(torch.nn.Module):
    """Two attentions with their own page tensors around a fused projection, as a compiled model has them."""

    def __init__(self, shape: AttentionShape, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        width = (shape.num_q_heads + shape.num_kv_heads) * shape.qk_dim + shape.num_kv_heads * shape.v_dim
        self.fused = torch.nn.ModuleList(torch.nn.Linear(hidden, width) for _ in range(2))
        self.out = torch.nn.ModuleList(torch.nn.Linear(shape.num_q_heads * shape.v_dim, hidden) for _ in range(2))

    def forward(self, x: torch.Tensor, pages: list[torch.Tensor], batch: list[torch.Tensor]) -> torch.Tensor:
        s = self.shape
        for layer in range(2):
            sizes = [s.num_q_heads * s.qk_dim, s.num_kv_heads * s.qk_dim, s.num_kv_heads * s.v_dim]
            q, k, v = self.fused[layer](x).split(sizes, -1)
            attended = torch.ops.chunkc.mixed_attention(
                q.unflatten(-1, (s.num_q_heads, s.qk_dim)),
                k.unflatten(-1, (s.num_kv_heads, s.qk_dim)),
                v.unflatten(-1, (s.num_kv_heads, s.v_dim)),
                pages[2 * layer],
                pages[2 * layer + 1],
                *batch,
                None,
                None,
                s.qk_dim**-0.5,
                0,
                0,
                0.0,
            )
            x = x + self.out[layer](attended.flatten(1))
        return x


def batch_of(case: MixedCase) -> list[torch.Tensor]:
    m, table = case.metadata, case.plan(kv_split=16)
    return [m.q_offsets, m.kv_lens, m.page_table, m.slot_mapping, table.tasks, table.merges]


def calls_in(code: str) -> list[ast.Call]:
    return [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.ops.chunkc.mixed_attention.default"
    ]


@torch.fx.experimental._config.patch(use_duck_shape=False)  # equal sizes of the first batch mean nothing
def test_compiled_layers_write_their_own_pages_in_place() -> None:
    assert cpu_backend.load()
    torch.manual_seed(0)
    torch._dynamo.reset()
    shape, hidden = AttentionShape(6, 2, 16, 16), 32
    model = TwoLayers(shape, hidden).eval()
    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    sources: set[str] = set()
    for q_lens, kv_lens in (([5, 1, 1], [5, 40, 17]), ([9, 2, 1, 1], [30, 2, 40, 19])):
        case = make_case(q_lens, kv_lens, shape)
        x = torch.randn(sum(q_lens), hidden)
        # One prefix for both layers; only what they append tells them apart.
        eager_pages = [p.clone() for p in (case.k_pages, case.v_pages) * 2]
        pages = [p.clone() for p in (case.k_pages, case.v_pages) * 2]
        places = [p.data_ptr() for p in pages]
        with torch.no_grad():
            want = model(x, eager_pages, batch_of(case))
            got, code = run_and_get_code(compiled, x, pages, batch_of(case))
        sources |= set(code)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        assert [p.data_ptr() for p in pages] == places
        for page, eager in zip(pages, eager_pages, strict=True):
            torch.testing.assert_close(page, eager, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert not torch.equal(pages[0].nan_to_num(), pages[2].nan_to_num())
        assert not torch.equal(pages[1].nan_to_num(), pages[3].nan_to_num())

    # One graph for both batches, which hands its own page arguments to the operator: a clone would copy a
    # layer's whole cache at every step. q, k and v are slices of the fused projection, not copies either.
    assert len(sources) == 1
    calls = calls_in(sources.pop())
    page_names = {ast.unparse(call.args[i]) for call in calls for i in (3, 4)}
    assert len(calls) == 2 and len(page_names) == 4
    assert all(name.startswith("arg") for name in page_names), page_names
    for call in calls:
        assert len({ast.unparse(x.args[0]) for x in call.args[:3]}) == 1
