"""A layer's own loss adds to the gradient of the model's loss. Both losses have the same weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dynmo.kernels.own_loss import add_loss
from dynmo.kernels.split import WeightTape
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.split_backward import Layer
from dynmo.runtime.layer.stage import Stage

FACTOR = 0.3  # weight of the layer's own loss


class Penalised(nn.Module):
    """A linear layer with a loss of its own: the mean square of what it returns."""

    tape: WeightTape | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return add_loss(y, FACTOR * (y * y).mean(), self.tape)


def mean(output: Tensor, targets: Tensor) -> Tensor:
    return (output - targets).abs().mean()


def expected(layers: int, x: Tensor, targets: Tensor, weight: float) -> list[Tensor]:
    """Gradients of weight * (the model's loss + all layers' own), by plain autograd."""
    modules = build(layers)
    own = torch.zeros(())
    for module in modules:
        x = module.linear(x)
        own = own + FACTOR * (x * x).mean()
    return list(
        torch.autograd.grad(
            weight * (mean(x, targets) + own), [p for m in modules for p in m.parameters()]
        )
    )


def build(layers: int) -> list[Penalised]:
    torch.manual_seed(0)
    return [Penalised() for _ in range(layers)]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 5), torch.randn(3, 5)


def close(modules: list[Penalised], gradients: list[Tensor]) -> None:
    torch.testing.assert_close([p.grad for m in modules for p in m.parameters()], gradients)


def test_loss_weight_is_one_without_a_tape() -> None:
    modules, (x, targets) = build(2), data()
    mean(modules[1](modules[0](x)), targets).backward()
    close(modules, expected(2, *data(), weight=1.0))


def test_tape_sets_the_loss_weight() -> None:
    modules, (x, targets) = build(1), data()
    modules[0].tape = WeightTape()
    modules[0].tape.loss_share = torch.tensor(0.25)
    (0.25 * mean(modules[0](x), targets)).backward()
    close(modules, expected(1, *data(), weight=0.25))


def test_loss_share_is_read_in_the_backward() -> None:
    """F may run before the loss scale of the step is known."""
    tape, a = WeightTape(), torch.ones((), requires_grad=True)
    out = add_loss(torch.zeros(2, requires_grad=True), 3 * a, tape)
    tape.loss_share = torch.tensor(4.0)
    out.sum().backward()
    assert a.grad is not None
    assert float(a.grad) == 12.0


def test_add_loss_returns_its_input() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(add_loss(x, torch.ones(()), None), x)


def test_loss_in_low_precision_keeps_its_dtype() -> None:
    tape, a = WeightTape(), torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    tape.loss_share = torch.tensor(0.5)
    add_loss(torch.zeros(2, requires_grad=True), 3 * a, tape).sum().backward()
    assert a.grad is not None
    assert (a.grad.dtype, float(a.grad)) == (torch.bfloat16, 1.5)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("scales", [(1.0,), (1024.0,), (8.0, 2.0)])
def test_stage_scales_the_own_loss(deferred: bool, scales: tuple[float, ...]) -> None:
    """Both losses of every layer have the same weight."""
    modules, (x, targets) = build(3), data()
    layers = [Layer(i, module, HostClock(), 0) for i, module in enumerate(modules)]
    stage = Stage(layers, 0, mean, share=0.25)
    for scale in scales:
        stage.scale_loss(scale)
    (loss,) = stage.forward(0, (x,), 0, targets, training=True)
    stage.backward_input(0, None, deferred)
    if deferred:
        stage.backward_weight(0)
    close(modules, expected(3, *data(), weight=0.25 * scales[-1]))
    plain = x
    for module in build(3):
        plain = module.linear(plain)
    torch.testing.assert_close(
        loss.detach(), mean(plain, targets).detach(), msg="the reported loss has no layer's own"
    )
