"""AdamW per layer is AdamW over the model, and the norm does not depend on how gradients are cut."""

from __future__ import annotations

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from dynmo.runtime.optimizer import NORM_BLOCK, AdamWSettings, LayerOptimizer, clip_factor, decays, squared_norm

SETTINGS = AdamWSettings(weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6)


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(9, 5), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 7)), nn.Tanh(), nn.Linear(7, 9, bias=False)]


def whole(modules: list[nn.Module], fused: bool) -> torch.optim.AdamW:
    """torch's optimizer over all layers at once."""
    parameters = [p for m in modules for p in m.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.2},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-6, fused=fused)


def give(modules: list[nn.Module], step: int) -> None:
    random = torch.Generator().manual_seed(step)
    for m in modules:
        for p in m.parameters():
            gradient = torch.randn(p.shape, generator=random)
            p.grad = gradient if p.requires_grad else None


def same_bits(ours: list[nn.Module], theirs: list[nn.Module]) -> bool:
    pairs = zip((p for m in ours for p in m.parameters()), (p for m in theirs for p in m.parameters()), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_equals_torch_over_the_whole_model() -> None:
    """Bit for bit with torch's fused kernel; within rounding with its plain one, which orders the arithmetic differently."""
    ours, theirs, plain = layers(), layers(), layers()
    optimizers = [LayerOptimizer(m, SETTINGS) for m in ours]
    others = [(theirs, whole(theirs, fused=True)), (plain, whole(plain, fused=False))]
    for step in range(5):
        lr = 0.1 / (step + 1)
        for modules in (ours, theirs, plain):
            give(modules, step)
        for optimizer in optimizers:
            optimizer.step(lr, 1.0)
        for _, adamw in others:
            for group in adamw.param_groups:
                group["lr"] = lr
            adamw.step()
    assert same_bits(ours, theirs)
    for a, b in zip((p for m in ours for p in m.parameters()), (p for m in plain for p in m.parameters()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for m in ours for p in m.parameters()), "a step drops the gradients"


def test_the_scale_multiplies_the_gradients() -> None:
    ours, theirs = layers(), layers()
    give(ours, 0)
    give(theirs, 0)
    for p in (p for m in theirs for p in m.parameters()):
        assert p.grad is not None
        p.grad *= 0.3
    for a, b in zip(ours, theirs, strict=True):
        LayerOptimizer(a, SETTINGS).step(0.1, 0.3)
        LayerOptimizer(b, SETTINGS).step(0.1, 1.0)
    assert same_bits(ours, theirs)


def test_frozen_parameters_stand_still() -> None:
    """No gradient: no decay, no moments; and what they had stays for thawing."""
    module = nn.Linear(4, 4)
    optimizer = LayerOptimizer(module, SETTINGS)
    give([module], 0)
    optimizer.step(0.1, 1.0)
    weight, state = module.weight.detach().clone(), {k: v.clone() for k, v in optimizer.state().items()}
    module.weight.requires_grad_(False)
    for step in (1, 2):
        give([module], step)
        optimizer.step(0.1, 1.0)
    assert torch.equal(module.weight, weight)
    for key, value in optimizer.state().items():
        assert torch.equal(value, state[key]) == key.startswith("weight/")
    assert state["weight/step"] == 1
    module.weight.requires_grad_(True)
    give([module], 3)
    optimizer.step(0.1, 1.0)
    assert optimizer.state()["weight/step"] == 2
    assert not torch.equal(module.weight, weight)


def test_state_and_load_go_on_with_the_same_bits() -> None:
    first = nn.Linear(4, 4)
    optimizer = LayerOptimizer(first, SETTINGS)
    for step in range(3):
        give([first], step)
        optimizer.step(0.1, 1.0)
    second = copy.deepcopy(first)
    restored = LayerOptimizer(second, SETTINGS)
    restored.load({key: value.clone() for key, value in optimizer.state().items()})
    assert set(optimizer.state()) == {f"{n}/{m}" for n in ("weight", "bias") for m in ("step", "exp_avg", "exp_avg_sq")}
    for step in range(3, 6):
        for module, each in ((first, optimizer), (second, restored)):
            give([module], step)
            each.step(0.1, 1.0)
    assert same_bits([first], [second])
    fresh = LayerOptimizer(copy.deepcopy(first), SETTINGS)
    assert fresh.state() == {}


def test_without_parameters() -> None:
    optimizer = LayerOptimizer(nn.Tanh(), SETTINGS)
    optimizer.step(0.1, 1.0)
    optimizer.load({})
    assert optimizer.state() == {}
    assert optimizer.state_bytes == 0


def test_shared_parameters_are_left_to_their_owner() -> None:
    module = nn.Linear(4, 4)
    optimizer = LayerOptimizer(module, SETTINGS, frozenset({"weight"}))
    give([module], 0)
    before = module.weight.detach().clone()
    optimizer.step(0.1, 1.0)
    assert torch.equal(module.weight, before)
    assert {key.split("/")[0] for key in optimizer.state()} == {"bias"}


def test_state_bytes() -> None:
    """Two moments a weight, before the first step and after it (and then a counter each)."""
    module = nn.Linear(4, 4)
    optimizer = LayerOptimizer(module, SETTINGS)
    assert optimizer.state_bytes == 2 * 4 * 20
    give([module], 0)
    optimizer.step(0.1, 1.0)
    assert optimizer.state_bytes == 2 * 4 * 20 + 2 * 4
    untrained = LayerOptimizer(nn.Linear(4, 4).requires_grad_(False), SETTINGS)
    assert untrained.state_bytes == 0


def test_decay_is_for_matrices() -> None:
    assert [decays(torch.zeros(shape)) for shape in ((), (3,), (3, 3), (3, 3, 3))] == [False, False, True, True]
    module = nn.Linear(4, 4)
    torch.nn.init.ones_(module.weight)
    torch.nn.init.ones_(module.bias)
    for p in module.parameters():
        p.grad = torch.zeros_like(p)
    LayerOptimizer(module, SETTINGS).step(0.5, 1.0)
    torch.testing.assert_close(module.weight.detach(), torch.full((4, 4), 1 - 0.5 * 0.2))
    assert torch.equal(module.bias.detach(), torch.ones(4))


@pytest.mark.parametrize("size", [1, 1000, NORM_BLOCK, NORM_BLOCK + 1, 3 * NORM_BLOCK + 17])
def test_squared_norm(size: int) -> None:
    gradient = torch.randn(size)
    total = squared_norm([gradient])
    assert total == pytest.approx(float(gradient.double().square().sum()), rel=1e-6)
    assert squared_norm([None, gradient.view(1, -1), None]) == total
    assert squared_norm([]) == 0.0
    assert squared_norm([torch.zeros(0)]) == 0.0


def test_squared_norm_of_shards() -> None:
    """Cut at block boundaries, wherever, it is the same number to the last bit."""
    torch.manual_seed(1)
    gradient = torch.randn(7 * NORM_BLOCK + 5) * torch.logspace(-4, 4, 7 * NORM_BLOCK + 5)
    expected = squared_norm([gradient])
    for cuts in ([1], [3], [2, 5], [1, 2, 3, 4, 5, 6, 7]):
        bounds = [0, *(c * NORM_BLOCK for c in cuts), len(gradient)]
        parts = [gradient[a:b] for a, b in pairwise(bounds)]
        assert squared_norm(parts) == expected
    matrix = gradient[: 4 * NORM_BLOCK].view(256, -1)
    assert squared_norm([matrix]) == squared_norm([gradient[: 4 * NORM_BLOCK]])


def test_clip_factor() -> None:
    assert clip_factor(5.0, 0.0) == 1.0
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(1.0, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) == pytest.approx(0.25)
    assert clip_factor(math.inf, 1.0) == 0.0
    gradients = [torch.randn(30), torch.randn(5, 5)]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    factor = clip_factor(math.sqrt(squared_norm(gradients)), 0.5)
    for p, g in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(p.grad, g * factor)
