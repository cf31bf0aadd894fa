"""Experts, compared with a reference that computes one token and expert at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from dynmo.cases.experts.layers import ExpertsHalf
from dynmo.config import parse
from dynmo.kernels.grouped_linear import GroupedLinear
from dynmo.models.options import ModelOptions
from dynmo.train.setup import model_of

TOP_K = st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n)))
"""The experts, and how many of them take a token."""


def half(seed: int, **options: Any) -> ExpertsHalf:
    torch.manual_seed(seed)
    module = ExpertsHalf(ModelOptions(kind="moe", hidden=8, init_std=0.3, **options)).double()
    module.router.weight.data.mul_(4)
    return module


def expert(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (gate * torch.sigmoid(gate) * up)


def load_of(module: ExpertsHalf) -> list[int]:
    assert isinstance(module.router.load, Tensor)
    return module.router.load.tolist()


def weight_of(linear: GroupedLinear, expert: int) -> nn.Parameter:
    weight = linear.weights[expert]
    assert weight is not None
    return weight


def plainly(module: ExpertsHalf, x: Tensor) -> tuple[Tensor, list[list[int]], Tensor]:
    """Output, the experts that compute each token, and the auxiliary loss."""
    rule, rows = module.router, x.reshape(-1, x.shape[-1])
    n_experts = range(rule.experts)
    normed = [row * torch.rsqrt(row.square().mean() + 1e-6) * module.norm.weight for row in rows]
    scores = [(module.router.weight.float() @ row.float()) for row in normed]
    chosen = [sorted(n_experts, key=s.neg().tolist().__getitem__)[: rule.top_k] for s in scores]
    taken, out, kept, most = [0] * rule.experts, list[Tensor](), list[list[int]](), math.inf
    if module.capacity_factor is not None:
        most = max(1, math.ceil(module.capacity_factor * len(rows) * rule.top_k / rule.experts))
    for row, n, s, choices in zip(rows, normed, scores, chosen, strict=True):
        p = torch.softmax(s, 0)
        total = sum(p[e] for e in choices) if rule.top_k > 1 else 1.0
        y, here = row, list[int]()
        for e in choices:
            if taken[e] < most:
                taken[e] += 1
                here.append(e)
                weights = (weight_of(linear, e) for linear in (module.gate_up, module.down))
                y = y + (p[e] / total).double() * expert(n, *weights)
        if module.shared_gate_up is not None and module.shared_down is not None:
            y = y + expert(n, module.shared_gate_up.weight, module.shared_down.weight)
        out.append(y)
        kept.append(sorted(here))
    f = [sum(e in choices for choices in chosen) / len(rows) / rule.top_k for e in n_experts]
    mean = torch.stack([torch.softmax(s, 0) for s in scores]).mean(0)
    loss = rule.experts * sum((f[e] * mean[e] for e in n_experts), torch.zeros(()))
    return torch.stack(out).view_as(x), kept, loss


FACTORS = st.sampled_from([None, 1.0, 1.5])


@given(st.integers(1, 2), st.integers(1, 6), TOP_K, FACTORS, st.integers(0, 2), st.integers(0, 999))
def test_experts_equal_a_token_by_token_reference(
    batch: int, sequence: int, top_k: tuple[int, int], factor: float | None, shared: int, seed: int
) -> None:
    experts, chosen = top_k
    module = half(
        seed,
        experts=experts,
        top_k=chosen,
        router_loss=0.5,
        capacity_factor=factor,
        shared_experts=shared,
    )
    x = torch.randn(batch, sequence, 8, dtype=torch.float64, requires_grad=True)
    y = module(x)
    expected, kept, loss = plainly(module, x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)  # the scores are float32
    assert sum(load_of(module)) == batch * sequence * chosen
    if factor is None:
        assert [sum(e in row for row in kept) for e in range(experts)] == load_of(module)
    g, inputs = torch.randn_like(y), (x, *module.parameters())
    ours = torch.autograd.grad(y, inputs, g, materialize_grads=True)
    theirs = torch.autograd.grad((expected * g).sum() + 0.5 * loss, inputs, materialize_grads=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_batch_without_tokens_is_allowed() -> None:
    """All tokens may have exited early."""
    module = half(0, experts=3, router_loss=0.5, shared_experts=1)
    x = torch.zeros(0, 8, dtype=torch.float64, requires_grad=True)
    y = module(x)
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("routing", ["sinkhorn", "auction"])
def test_balanced_routing_evens_the_load_in_training(routing: str) -> None:
    """Evaluation takes the largest scores."""
    module = half(3, experts=4, routing=routing)
    x = torch.randn(4, 16, 8, dtype=torch.float64) + 1.0
    module(x)
    assert sum(load_of(module)) == 128
    assert max(load_of(module)) <= (32 if routing == "auction" else 44)
    module.eval()
    torch.testing.assert_close(module(x), plainly(module, x)[0], rtol=1e-6, atol=1e-6)


def test_router_bias_changes_the_choice_only() -> None:
    module = half(1, experts=3, top_k=1, routing="bias")
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    module.router.bias[2] = 10.0
    flat = module.norm(x.reshape(-1, 8))
    _, chosen, weights, load = module.router(flat)
    assert chosen.flatten().tolist() == [2] * 6
    assert load.tolist() == [0, 0, 6]
    expected = functional.linear(flat.float(), module.router.weight.float()).softmax(-1)[:, 2]
    torch.testing.assert_close(weights.flatten(), expected)


def test_blocks_with_experts() -> None:
    sizes = {"blocks": 4, "hidden": 16, "heads": 2, "sequence": 8}
    experts = {"kind": "moe", "experts": 3, "moe_every": 2, "shared_experts": 1}
    model = model_of(parse({"model": sizes | experts}))
    layers = model.build(range(model.layers))
    assert [isinstance(layer, ExpertsHalf) for layer in layers] == [i in (4, 8) for i in range(10)]


@given(TOP_K, st.integers(1, 12), st.sampled_from(["sinkhorn", "auction"]), st.integers(0, 99))
def test_experts_are_distinct(top_k: tuple[int, int], tokens: int, routing: str, seed: int) -> None:
    """There may be fewer tokens than experts. No assignment is balanced then."""
    module = half(seed, experts=top_k[0], top_k=top_k[1], routing=routing)
    _, chosen, _, _ = module.router(torch.randn(tokens, 8, dtype=torch.float64))
    assert all(len(set(row)) == top_k[1] for row in chosen.tolist())
