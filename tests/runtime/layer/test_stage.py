"""A stage that the frozen prefix cuts. Layers below the cut keep no activations and run no B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.errors import RunError
from dynmo.runtime.layer.stage import Stage
from dynmo.schedule.op import Kind
from tests.runtime.modules import layer_of

FIRST = 4  # global index of the stage's first layer


def stage(
    first_trainable: int, loss: bool = False, share: float = 1.0
) -> tuple[Stage, list[nn.Module]]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [
        nn.Linear(6, 6).requires_grad_(FIRST + i >= first_trainable) for i in range(4)
    ]
    layers = [layer_of(module, FIRST + i) for i, module in enumerate(modules)]
    return Stage(layers, first_trainable, functional.mse_loss if loss else None, share), modules


@pytest.mark.parametrize("first_trainable", [0, 4, 5, 6, 7])
def test_frozen_prefix_of_a_stage_runs_forward_only(first_trainable: int) -> None:
    whole, modules = stage(first_trainable)
    x = torch.randn(3, 6, requires_grad=True)
    (y,) = whole.forward(0, (x,), 0, None, training=True)
    gradients = whole.backward_input(0, (torch.ones_like(y),), deferred=True)
    whole.backward_weight(0)
    elided = [layer.index < first_trainable for layer in whole.layers]
    kinds = [[mark[0] for mark in layer.marks] for layer in whole.layers]
    assert kinds == [[Kind.F] if gone else [Kind.F, Kind.B, Kind.W] for gone in elided]
    assert [layer.meter.activation_bytes > 0 for layer in whole.layers] == [
        not gone for gone in elided
    ]
    assert [p.grad is not None for m in modules for p in m.parameters()] == [
        not gone for gone in elided for _ in range(2)
    ]
    # A layer hands on a gradient if the layer below it trains. Nobody waits for a gradient where
    # the trainable part begins.
    expected: Any = x.detach().clone().requires_grad_()
    nn.Sequential(*modules)(expected).sum().backward()
    wanted = (expected.grad,) if first_trainable < FIRST else ()
    torch.testing.assert_close(gradients, wanted)


def test_loss_share_scales_the_gradients() -> None:
    whole, modules = stage(0, loss=True, share=0.25)
    x, aim = torch.randn(3, 6), torch.randn(3, 6)
    (loss,) = whole.forward(0, (x,), 0, aim, training=True)
    whole.backward_input(0, None, deferred=False)
    ours = [p.grad for m in modules for p in m.parameters()]
    plain: Tensor = x
    for module in modules:
        module.zero_grad()
        # Not the module itself: it has a tape by now.
        plain = functional.linear(plain, *module.parameters())
    expected = functional.mse_loss(plain, aim)
    assert loss.detach() == expected.detach()
    (expected / 4).backward()
    torch.testing.assert_close(ours, [p.grad for m in modules for p in m.parameters()])


def test_loss_without_training_keeps_no_activations_and_is_a_scalar() -> None:
    whole, _ = stage(0, loss=True)
    (loss,) = whole.forward(0, (torch.randn(3, 6),), 0, torch.randn(3, 6), training=False)
    assert not loss.requires_grad
    assert not any(layer._spans for layer in whole.layers)
    whole = Stage(stage(0)[0].layers, 0, lambda out, aim: out - aim)
    with pytest.raises(RunError, match=r"loss function .*\(3, 6\)"):
        whole.forward(0, (torch.randn(3, 6),), 0, torch.randn(3, 6), training=True)
