"""The error of a step that is not finite says where the first such value is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dynmo
from dynmo.errors import RunError
from dynmo.pipeline.options import grouped
from tests.pool import Pool

MICROBATCHES = 4


class Root(nn.Module):
    """Its gradient at 0 is infinite, its value is not."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - 3).abs().sqrt() + x


class Inverse(nn.Module):
    """Its value at 5 is infinite. `Root` makes 5 of 4."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1e-3 / (x - 5)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


CASES = {
    "weight": "The weight 'gain' of layer 3 (3.Scale) was not finite before the step",
    "inputs": "The inputs of microbatch 2 are not",
    "targets": "The targets of microbatch 2 are not",
    "output": "The first such value is an output of layer 2 (2.Inverse) in microbatch 2",
    "gradient": "The first such value is a gradient, at layer 1 (1.Root) in microbatch 2",
    "loss": "The first such value is an output of layer 4 (4.Scale) or of the loss in microbatch 2",
}


def loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) / (target - 7)).square().mean()


def failing(world: dynmo.World, case: str, **options: Any) -> tuple[str, bool]:
    """A good step, and one that fails. Returns its message, and whether it changed nothing."""
    torch.manual_seed(0)
    layers = [Scale(), Root(), Inverse(), Scale(), Scale()]
    model = dynmo.Sequential(layers, loss)
    replicas = options.get("replicas", 1)
    options = {"microbatches": MICROBATCHES // replicas, "stop_after": 1} | options
    # The first layer hands on what it gets.
    options["groups"] = lambda name, _: {"lr": 0.0, "weight_decay": 0.0} if name[0] == "0" else None
    pipeline = dynmo.Pipeline(model, world, **grouped(options))
    inputs, targets = torch.rand(8, 4), torch.rand(8, 4)
    own = slice(8 // replicas * pipeline.mesh.replica, 8 // replicas * (pipeline.mesh.replica + 1))
    pipeline.step(inputs[own], targets[own])
    before = pipeline.digest()
    if case == "weight" and 3 in pipeline.mesh.modules:
        pipeline.mesh.modules[3].get_parameter("gain").data[1] = math.inf
    elif case != "weight":
        rows = (targets if case in ("targets", "loss") else inputs)[4]
        rows[1] = {"output": 4.0, "gradient": 3.0, "loss": 7.0}.get(case, math.nan)
    try:
        pipeline.step(inputs[own], targets[own])
    except RunError as error:
        return str(error), case == "weight" or pipeline.digest() == before
    return "", False


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"schedule": "1f1b"}),
        (2, {"schedule": "zb-h1"}),
        (2, {"schedule": "zb-h1", "post_validation": True}),
        (2, {"schedule": "1f1b", "replicas": 2}),
    ],
    ids=["one rank", "two ranks", "post-validation", "replicas"],
)
def test_first_value_that_is_not_finite_is_named(
    pool: Pool, case: str, ranks: int, options: dict[str, Any]
) -> None:
    job = "tests.pipeline.test_not_finite:failing"
    for said, unchanged in pool.run(job, ranks, case=case, **options):
        assert said.startswith("step 1: loss ")
        assert CASES[case] in said
        assert said.endswith("Lower the learning rate or check the data")
        assert unchanged
