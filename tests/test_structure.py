"""describe: graphs that differ in anything that matters have different texts, and names do not matter."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from chunkc.structure import describe

aten = torch.ops.aten


def graph(name="x", size=(2, 3), dtype=torch.float32, target=aten.add.Tensor, args=(1,), kwargs=None, strides=None):
    """x -> target(x, *args)"""
    result = fx.Graph()
    x = result.placeholder(name)
    with FakeTensorMode(shape_env=ShapeEnv()):
        fake = torch.empty(size, dtype=dtype)
        x.meta["val"] = fake if strides is None else torch.empty_strided(size, strides, dtype=dtype)
        y = result.call_function(target, (x, *args), kwargs or {})
        y.meta["val"] = fake
        result.output((y,)).meta["val"] = (fake,)
    return result


VARIANTS = {
    "plain": {},
    "float constant": {"args": (1.0,)},
    "bool constant": {"args": (True,)},
    "other constant": {"args": (2,)},
    "close constant": {"args": (1.0000000000000002,)},
    "tiny constant": {"args": (1e-300,)},
    "zero": {"args": (0.0,)},
    "negative zero": {"args": (-0.0,)},
    "keyword": {"kwargs": {"alpha": 2}},
    "other operator": {"target": aten.sub.Tensor},
    "other overload": {"target": aten.add.Scalar},
    "size": {"size": (3, 2)},
    "rank": {"size": (2, 3, 1)},
    "dtype": {"dtype": torch.float64},
    "strides": {"strides": (1, 2)},
    "none": {"args": (None,)},
    "text": {"args": ("None",)},
    "list": {"args": ([1, 2],)},
    "nested list": {"args": ([[1], 2],)},
    "dtype constant": {"args": (torch.float32,)},
}


@pytest.mark.parametrize("one, other", list(itertools.combinations(VARIANTS, 2)))
def test_what_matters_shows(one, other):
    assert describe(graph(**VARIANTS[one])) != describe(graph(**VARIANTS[other]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_do_not_matter(variant):
    assert describe(graph("x", **VARIANTS[variant])) == describe(graph("y", **VARIANTS[variant]))


def test_what_cannot_be_told_is_an_error():
    with pytest.raises(ValueError, match="constant of type Tensor"):
        describe(graph(args=(torch.ones(1),)))
    with pytest.raises(ValueError, match="has no name"):
        describe(graph(target=lambda x: x, args=()))
