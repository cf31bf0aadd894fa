"""The warning that most weight gradients of a layer cannot wait for W."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

import dynmo
from dynmo.pipeline.options import grouped
from tests.pool import Pool
from tests.runtime.modules import Net

JOB = "tests.runtime.layer.test_early_weights:warned"
TOKENS, WIDTH = 3, 8


class Recurrent(Net):
    """Its GRU has 384 weights, which cannot wait. Its linears may have more."""


def warned(world: dynmo.World, inner: list[int], **options: Any) -> list[str]:
    """Trains, and returns this rank's warnings. A size of 0 stands for an idle layer."""
    told: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("dynmo")
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    try:
        train(world, inner, **options)
    finally:
        logger.removeHandler(handler)
    return told


def train(world: dynmo.World, inner: list[int], **options: Any) -> None:
    torch.manual_seed(0)

    def block(size: int) -> nn.Module:
        first = nn.Linear(WIDTH, size or WIDTH)
        if size == 0:  # like a layer before which all tokens have exited
            return Net(lambda m, x: 2 * x, first=first)
        parts = {"cell": nn.GRU(WIDTH, WIDTH), "first": first, "second": nn.Linear(size, WIDTH)}
        return Recurrent(lambda m, x: m.second(m.first(m.cell(x)[0])), **parts)

    blocks = [block(size) for size in inner]
    layers = [nn.LayerNorm(WIDTH), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    model = dynmo.Sequential(layers, loss=nn.functional.mse_loss)
    pipeline = dynmo.Pipeline(model, world, microbatches=4, balance="none", **grouped(options))
    batch = torch.randn(2, 4, TOKENS, WIDTH)
    for _ in range(2):
        pipeline.step(*batch)
    pipeline.close()


@pytest.mark.parametrize(("schedule", "replicas"), [("zb-h1", 1), ("zb-v", 1), ("zb-h1", 2)])
def test_kind_of_layer_is_named_once(pool: Pool, schedule: str, replicas: int) -> None:
    """All ranks hold layers of this kind. 25 % of the weights of each wait."""
    options: dict[str, Any] = {"schedule": schedule, "replicas": replicas}
    (told,) = chain(*pool.run(JOB, 2 * replicas, inner=[8, 8, 8], **options))
    assert told.startswith("layer 3 (Recurrent), and those like it: the gradients of 25% of the ")
    assert "dynmo.register_split" in told


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
