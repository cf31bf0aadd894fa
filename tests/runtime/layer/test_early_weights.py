"""The warning that most weight gradients of a layer cannot wait for W."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from tests.pool import Pool

JOB = "tests.runtime.layer.test_early_weights:warned"
TOKENS, WIDTH = 3, 8


class Recurrent(nn.Module):
    """Its GRU has 384 weights, which cannot wait. Its linears may have more."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(self.cell(x)[0]))


class Idle(nn.Module):
    """Its weights take no part, like those of a layer before which all tokens have exited."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def warned(world: dynmo.World, inner: list[int], **options: Any) -> list[str]:
    """Trains, and returns this rank's warnings. A size of 0 stands for an idle layer."""
    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler, logger = Told(logging.WARNING), logging.getLogger("dynmo")
    logger.addHandler(handler)
    try:
        train(world, inner, **options)
    finally:
        logger.removeHandler(handler)
    return told


def train(world: dynmo.World, inner: list[int], **options: Any) -> None:
    torch.manual_seed(0)
    blocks = [Recurrent(each) if each else Idle() for each in inner]
    layers = [nn.LayerNorm(WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=4, balance="none", **options)
    batch = torch.randn(2, 4, TOKENS, WIDTH)
    for _ in range(2):
        pipeline.step(*batch)
    pipeline.close()


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_kind_of_layer_is_named_once(pool: Pool, schedule: str) -> None:
    """Both ranks hold layers of this kind. 25 % of the weights of each wait."""
    (told,) = chain(*pool.run(JOB, 2, inner=[8, 8, 8], schedule=schedule))
    assert told.startswith("layer 3 (Recurrent), and those like it: the gradients of 25% of the ")
    assert "dynmo.register_split" in told


def test_only_one_replica_warns(pool: Pool) -> None:
    told = pool.run(JOB, 4, inner=[8, 8, 8], schedule="zb-h1", replicas=2)
    assert len(list(chain(*told))) == 1


@pytest.mark.parametrize(
    ("inner", "schedule"),
    [
        pytest.param(64, "zb-h1", id="most weights wait"),
        pytest.param(8, "1f1b", id="there is no W"),
        pytest.param(0, "zb-h1", id="no weight takes part"),
    ],
)
def test_nothing_is_said(pool: Pool, inner: int, schedule: str) -> None:
    assert pool.run(JOB, 2, inner=[inner] * 3, schedule=schedule) == [[], []]
