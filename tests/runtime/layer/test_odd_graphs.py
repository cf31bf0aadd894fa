"""Layers whose graphs are unusual have the gradients of plain torch, cut or not, W late or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.layer import Layer
from dynmo.runtime.layer.stage import Stage
from tests.runtime.modules import Net, assert_same, gradients_of

WAYS = [(joined, deferred) for joined in (True, False) for deferred in (True, False)]


def linear() -> nn.Linear:
    return nn.Linear(6, 6)


def is_odd(x: Tensor) -> bool:
    """A bit of the data."""
    return bool(int(x.detach().abs().sum() * 1e4) % 2)


class OwnCheckpoint(torch.autograd.Function):
    """Runs a module again in its backward, which trains it."""

    @staticmethod
    def forward(ctx: Any, run: nn.Module, x: Tensor, leaf: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        with torch.enable_grad():
            torch.autograd.backward(ctx.run(*ctx.saved_tensors), gradients[0])
        return None, None, None


def own_checkpoint(m: Any, x: Tensor) -> Tensor:
    return OwnCheckpoint.apply(m.a, x, torch.zeros((), requires_grad=True))  # pyright: ignore[reportReturnType]


def hook_on_an_output(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y * 1


def hook_on_an_input(m: Any, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient * 2)
    return m.a(x)


def another_by_itself(m: Any, x: Tensor) -> Tensor:
    return m.a(x) + m.b(x) * (m.a if is_odd(x) else m.b).weight.sum()


def bias_by_itself(m: Any, x: Tensor) -> Tensor:
    return m.a(x) * m.a.bias


def by_itself_at_times(m: Any, x: Tensor) -> Tensor:
    return (x.unsqueeze(-2) * m.a.weight).sum(-1) if is_odd(x) else m.a(x)


def hook_on_a_leaf(m: Any, x: Tensor) -> Tensor:
    leaf = torch.zeros_like(x, requires_grad=True)
    leaf.register_hook(lambda gradient: m.seen.add_(1) and gradient)
    return m.a(x) + leaf


def in_and_beside_a_checkpoint(m: Any, x: Tensor) -> Any:
    y = x if x.requires_grad else x * m.a.bias.sum()
    return m.a(checkpoint(lambda x: m.a(x.tanh()), y, use_reentrant=True))


def transposed(m: Any, x: Tensor) -> Tensor:
    return m.a(x.unsqueeze(0).transpose(0, 1).expand(-1, 2, -1).transpose(0, 1)).sum(0)


def net(run: Callable[[Any, Tensor], Any]) -> nn.Module:
    return Net(run, a=linear(), b=linear())


KINDS: dict[str, tuple[Callable[[], list[nn.Module]], bool]] = {
    run.__name__: ((lambda run=run: [linear(), net(run), linear()]), True)
    for run in (
        hook_on_an_output,
        hook_on_an_input,
        another_by_itself,
        bias_by_itself,
        in_and_beside_a_checkpoint,
        transposed,
    )
}
# Without a gradient of its input.
KINDS |= {
    f"first {run.__name__}": ((lambda run=run: [net(run), linear()]), True)
    for run in (own_checkpoint, another_by_itself, in_and_beside_a_checkpoint)
}
KINDS["nothing at times"] = (
    lambda: [
        linear(),
        Net(lambda m, x: m.a(torch.ones_like(x) if is_odd(x) else x), a=linear()),
        linear(),
        Net(lambda m, x: m.a(torch.ones_like(x)), a=linear()),
    ],
    True,
)
# The order of sums differs in its first step.
KINDS["by itself at times"] = (lambda: [linear(), net(by_itself_at_times), linear()], False)


def trained(modules: list[nn.Module], batch: Tensor, joined: bool, deferred: bool) -> Stage:
    """Runs two steps. The gradients of the second one stay."""
    layers = [Layer(i, module, HostClock(), 0, others=dict) for i, module in enumerate(modules)]
    for layer in layers:
        layer.is_timed = not joined
    stage = Stage(layers, 0, functional.mse_loss)
    for step in range(2):
        for module in modules:
            module.zero_grad()
        stage.begin()
        for j, x in enumerate(batch):
            stage.forward(j, (x,), step, x, training=True)
        for j in range(len(batch)):
            stage.backward_input(j, None, deferred)
        if deferred:
            for j in range(len(batch)):
                stage.backward_weight(j)
    return stage


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_plain_torch(kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    make, is_exact = KINDS[kind]
    modules, batch = make(), torch.randn(6, 5, 6)
    check(modules, batch, is_exact)


def check(modules: list[nn.Module], batch: Tensor, is_exact: bool) -> None:
    """Compares with plain torch, to the bit or nearly."""
    plain = copy.deepcopy(modules)
    for x in batch:
        functional.mse_loss(nn.Sequential(*plain)(x), x).backward()
    for joined, deferred in WAYS:
        ours = copy.deepcopy(modules)
        trained(ours, batch, joined, deferred)
        for one, other in zip(ours, plain, strict=True):
            if is_exact:
                assert_same(gradients_of(one), gradients_of(other))
            else:
                torch.testing.assert_close(gradients_of(one), gradients_of(other))


def test_hooks_on_leaves_that_f_makes_run() -> None:
    module = net(hook_on_a_leaf)
    for joined, deferred in WAYS:
        module.register_buffer("seen", torch.zeros(()), persistent=False)
        trained([linear(), module], torch.randn(4, 5, 6), joined, deferred)
        assert module.get_buffer("seen") > 0


def test_backward_within_f_ends_at_the_layers_inputs() -> None:
    """It adds to the gradients of the layer and of its input."""

    def run(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        if y.requires_grad:
            y.square().mean().backward(retain_graph=True)
        return y

    torch.manual_seed(0)
    modules, batch = [linear(), net(run)], torch.randn(4, 5, 6)
    check(modules, batch, is_exact=False)
    joined, apart = copy.deepcopy(modules), copy.deepcopy(modules)
    trained(joined, batch, joined=True, deferred=True)
    trained(apart, batch, joined=False, deferred=True)
    for one, other in zip(joined, apart, strict=True):
        assert_same(gradients_of(one), gradients_of(other))


def test_evaluation_keeps_no_inputs() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return torch.autograd.grad(m.a(z).square().sum(), z)[0]

    layer = Layer(0, net(run), HostClock(), 0)
    layer.forward(0, (torch.randn(5, 6),), 0, graph=False)
    assert not layer.tape.products
