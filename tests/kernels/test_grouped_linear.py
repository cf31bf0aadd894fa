"""Linears of several groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dynmo.kernels.grouped_linear import GroupedLinear, parts
from tests.kernels.test_split import gradients, run, split

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def one_by_one(x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    groups = [group for group, count in enumerate(counts) for _ in range(count)]
    rows = [weight[group] @ row for group, row in zip(groups, x, strict=True)]
    return torch.stack(rows) if rows else x @ weight[0].t()


@given(COUNTS, st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_groups_equal_own_matrices(counts: list[int], inputs: int, outputs: int, seed: int) -> None:
    torch.manual_seed(seed)
    layer = GroupedLinear(len(counts), inputs, outputs, 1.0).double()
    x = torch.randn(sum(counts), inputs, dtype=torch.float64, requires_grad=True)
    weights = [weight for weight in layer.weights if weight is not None]
    y, expected = layer(x, counts), one_by_one(x, torch.stack(tuple(weights)), counts)
    torch.testing.assert_close(y, expected)
    g = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, *weights), g, allow_unused=True)
    theirs = torch.autograd.grad(expected, (x, *weights), g, materialize_grads=True)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deferred_w_has_the_same_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    counts, found = [3, 0, 5], list[Tensor]()
    layer = GroupedLinear(3, 8, 4, 1.0).to(dtype)
    x, g = torch.randn(2, 8, 8).to(dtype), torch.randn(2, 8, 4).to(dtype)
    for deferred in (False, True):
        layer.zero_grad()
        tape = split(layer, deferred)
        for i in range(2):
            layer(x[i].requires_grad_(), counts).backward(g[i])
        run(tape)
        found.append(torch.stack(gradients(layer)))
    assert found[0].dtype == torch.float32
    assert torch.equal(*found)
    assert not found[0][1].any(), "a group without rows has no gradient"


def test_empty_experts_have_no_part() -> None:
    assert list(parts([2, 0, 3])) == [(0, slice(0, 2)), (2, slice(2, 5))]
    assert not list(parts([0, 0]))
