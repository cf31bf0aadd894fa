"""A layer's own loss adds to the gradient of the model's loss. Both losses have the same weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dynmo.kernels.split import WeightTape, add_loss
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.layer import Layer
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
    parameters = [p for m in modules for p in m.parameters()]
    return list(torch.autograd.grad(weight * (mean(x, targets) + own), parameters))


def build(layers: int) -> list[Penalised]:
    torch.manual_seed(0)
    return [Penalised() for _ in range(layers)]


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(3, 5), torch.randn(3, 5)


def close(modules: list[Penalised], gradients: list[Tensor]) -> None:
    torch.testing.assert_close([p.grad for m in modules for p in m.parameters()], gradients)


@pytest.mark.parametrize(("layers", "weight"), [(2, 1.0), (1, 0.25)])
def test_tape_sets_the_loss_weight(layers: int, weight: float) -> None:
    """The weight is one without a tape."""
    modules, (x, targets) = build(layers), data()
    if weight != 1:
        modules[0].tape = WeightTape()
        modules[0].tape.loss_gradient = torch.tensor(weight)
    for module in modules:
        x = module(x)
    (weight * mean(x, targets)).backward()
    close(modules, expected(layers, *data(), weight=weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_gradient_is_read_in_the_backward(dtype: torch.dtype) -> None:
    """F may run before the loss scale of the step is known. The gradient keeps its dtype."""
    tape, a = WeightTape(), torch.ones((), dtype=dtype, requires_grad=True)
    out = add_loss(torch.zeros(2, requires_grad=True), 3 * a, tape)
    assert torch.equal(out, torch.zeros(2))
    tape.loss_gradient = torch.tensor(0.5)
    out.sum().backward()
    assert a.grad is not None
    assert (a.grad.dtype, float(a.grad)) == (dtype, 1.5)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("scales", [(1.0,), (1024.0,), (8.0, 2.0)])
def test_stage_scales_the_own_loss(deferred: bool, scales: tuple[float, ...]) -> None:
    modules, (x, targets) = build(3), data()
    layers = [Layer(i, module, HostClock(), 0) for i, module in enumerate(modules)]
    stage = Stage(layers, 0, mean, loss_weight=0.25)
    for scale in scales:
        stage.scale_loss(scale)
    (loss,) = stage.forward(0, (x,), 0, targets, training=True)
    stage.backward_input(0, None, deferred)
    if deferred:
        stage.backward_weight(0)
    close(modules, expected(3, *data(), weight=0.25 * scales[-1]))
    plain = nn.Sequential(*(module.linear for module in build(3)))(x)
    # The reported loss has no layer's own.
    torch.testing.assert_close(loss.detach(), mean(plain, targets).detach())
