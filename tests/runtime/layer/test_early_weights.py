"""dynmo warns of layers most of whose weight gradients cannot wait."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.split_backward import Layer
from tests.pool import Pool

LOGGER = "dynmo.runtime.layer.split_backward"
WIDTH = 8


class Convolution(nn.Module):
    """[batch, WIDTH] in and out. A third of the weights is in a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv1d(WIDTH, 2 * WIDTH, 1, bias=False)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x.unsqueeze(-1)).squeeze(-1)[:, :WIDTH])


def step(layer: Layer, deferred: bool = True) -> None:
    (y,) = layer.forward(0, (torch.randn(3, WIDTH),), 0, True, False, None)
    layer.backward_input(0, (torch.ones_like(y),), deferred=deferred)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (Convolution(), "layer 2 (Convolution), and those like it: the gradients of 33%"),
        (nn.Linear(WIDTH, WIDTH), None),
        (nn.Sequential(Convolution().requires_grad_(False), nn.Linear(WIDTH, WIDTH)), None),
    ],
)
def test_share_of_weights_that_wait_is_told_once(
    module: nn.Module, says: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    layer = Layer(2, module, HostClock(), 0)
    layer.warns = True
    for _ in range(2):
        step(layer)
        layer.forget_sizes()
    messages = [each.message for each in caplog.records if each.name == LOGGER]
    assert [message.startswith(says or "?") for message in messages] == [True] * bool(says)


def test_schedule_with_a_whole_backward_needs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer(2, Convolution(), HostClock(), 0)
    layer.warns = True
    step(layer, deferred=False)
    assert not caplog.records


def warnings_of(world: dynmo.World) -> list[str]:
    """Trains three layers of one kind and one of another. Returns what the rank warned of."""
    messages, handler = list[str](), logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger(LOGGER)
    logger.addHandler(handler)
    torch.manual_seed(0)
    layers = [*(Convolution() for _ in range(3)), nn.Sequential(Convolution(), nn.Tanh())]
    pipeline = dynmo.Pipeline(
        dynmo.Sequential(layers, loss=nn.functional.mse_loss),
        world,
        schedule="zb-h1",
        microbatches=4,
        replicas=2,
        balance="none",
    )
    pipeline.step(torch.randn(8, WIDTH), torch.zeros(8, WIDTH))
    logger.removeHandler(handler)
    return [message[: message.index(")")] for message in messages]


def test_last_layer_of_each_kind_warns_on_one_replica(pool: Pool) -> None:
    said = pool.run("tests.runtime.layer.test_early_weights:warnings_of", 4)
    assert sorted(text for each in said for text in each) == [
        "layer 2 (Convolution",
        "layer 3 (Sequential",
    ]
