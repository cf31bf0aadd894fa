"""A stage that the frozen prefix cuts. Layers below the cut keep no activations and run no B."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.errors import RunError
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import FrozenPrefix, Stage
from dynmo.schedule.op import Kind
from tests.runtime.modules import Net, draw, layer_of

FIRST = 4  # global index of the stage's first layer


def stage(
    first_trainable: int, loss: bool = False, loss_weight: float = 1.0
) -> tuple[Stage, list[nn.Module]]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [
        nn.Linear(6, 6).requires_grad_(FIRST + i >= first_trainable) for i in range(4)
    ]
    layers = [layer_of(module, FIRST + i) for i, module in enumerate(modules)]
    return Stage(
        layers, first_trainable, functional.mse_loss if loss else None, loss_weight
    ), modules


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
    whole, modules = stage(0, loss=True, loss_weight=0.25)
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
    assert not any(layer._graphs for layer in whole.layers)
    whole = Stage(stage(0)[0].layers, 0, lambda out, aim: out - aim)
    with pytest.raises(RunError, match=r"loss function .*\(3, 6\)"):
        whole.forward(0, (torch.randn(3, 6),), 0, torch.randn(3, 6), training=True)


X = draw(0, 3, 6)


def layers(*modules: nn.Module) -> list[Layer]:
    return [layer_of(module, i + 4) for i, module in enumerate(modules)]


def linears(count: int) -> list[Layer]:
    torch.manual_seed(0)
    return layers(*(nn.Linear(6, 6) for _ in range(count)))


def prefix(given: list[Layer], training: bool = True) -> FrozenPrefix:
    return FrozenPrefix(given, 2, (X,), 0, training)


@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_layers_behind_the_skipped_ones_run(skip: int) -> None:
    given = linears(3)
    outputs: list[Tensor] = [X]
    for layer in given:
        outputs.append(layer.module(outputs[-1]))
    frozen = prefix(given)
    (y,) = frozen.run((outputs[skip].detach(),), skip)
    assert torch.equal(y, outputs[-1])
    assert (frozen.layers, frozen.microbatch, frozen.skipped) == ((4, 5, 6), 2, skip)
    assert [[kind for kind, *_ in layer.marks] for layer in given] == [[Kind.F]] * 3
    seconds = [end - start for layer in given for _, start, end, _ in layer.marks]
    assert seconds[: max(0, skip - 1)] == [0.0] * max(0, skip - 1)
    assert all(each > 0 for each in seconds[max(0, skip - 1) :])


def test_layers_that_have_run_are_measured() -> None:
    given = linears(3)
    assert prefix(given).measured == 0
    prefix(given[:2]).run((X,))
    assert prefix(given).measured == 2
    assert prefix(given[:2]).measured == 2


def test_drawing_and_writing_layers_are_named() -> None:
    def write(module: nn.Module, x: Tensor) -> Tensor:
        module.get_buffer("seen").add_(1)
        return x

    writing = Net(write)
    writing.register_buffer("seen", torch.zeros(()))
    own = Net(lambda m, x: x)
    vars(own)["generator"] = torch.Generator()
    for modules, drew, wrote in (
        ([nn.Linear(6, 6)], None, None),
        ([nn.Linear(6, 6), nn.Dropout(0.5)], "layer 5 (Dropout)", None),
        ([nn.Dropout(0.5), writing], "layer 4 (Dropout)", ("layer 5 (Net)", "seen")),
        ([own], "layer 4 (Net)", None),
    ):
        frozen = prefix(layers(*modules))
        frozen.run((X,))
        assert (frozen.drew, frozen.wrote) == (drew, wrote)
