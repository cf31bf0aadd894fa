"""Layers with dropout whose owner sets modes, for `test_modes.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dynmo
from dynmo.runtime.layer.census import evaluating_parts
from tests.pipeline import jobs

STEPS, MICROBATCHES = 6, 3


class Block(nn.Module):
    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Sequential(nn.Dropout(rate), nn.Dropout(rate))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


def layers(rate: float = 0.5) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(8, 8), *(Block(rate) for _ in range(4))]


batch = partial(jobs.batch, rows=9, inputs=8, targets=8)
make = partial(
    jobs.make,
    microbatches=MICROBATCHES,
    max_grad_norm=0,
    optimizer=dynmo.SGD(lr=0.1, momentum=0.0, weight_decay=0.0),
)


def modes(pipeline: dynmo.Pipeline) -> dict[int, list[str]]:
    return {index: evaluating_parts(module) for index, module in pipeline.mesh.modules.items()}


def train(
    world: dynmo.World, folder: str = "", resumes: bool = False, moves: bool = False, **options: Any
) -> dict[str, Any]:
    """Sets modes before the run and at step 2. Saves or resumes at step 4, after moves."""
    made = layers()
    made[1].get_submodule("dropout.0").eval()
    made[4].eval()
    pipeline = make(world, made, resume=folder if resumes else None, **options)
    losses, evaluated = list[float](), list[float]()
    for step in range(pipeline.steps, STEPS):
        if step == 2:
            for index, name in ((2, "dropout"), (3, "dropout.1")):
                if index in pipeline.mesh.modules:
                    pipeline.mesh.modules[index].get_submodule(name).eval()
        if moves and step in (1, 3, 5):
            counts = list(pipeline.mesh.partition.counts)
            pipeline.move(
                [*counts[1:], counts[0]] if step != 3 else [1] * (world.size - 1) + [6 - world.size]
            )
        losses.append(pipeline.step(*batch(step)).loss)
        evaluated.append(pipeline.evaluate(*batch(0)))
        if step == 3 and folder and not resumes:
            pipeline.save(folder)
    return {
        "losses": losses,
        "evaluated": evaluated[-1],
        "weights": pipeline.digest(),
        "modes": modes(pipeline),
    }


class Doubled(nn.Linear):
    """Doubles its output while it trains."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (2 if self.training else 1)


def cached(world: dynmo.World, cache: str) -> list[float]:
    """Returns losses of one batch. The frozen prefix is on two ranks, and one mode changes."""
    torch.manual_seed(0)
    made: list[nn.Module] = [Doubled(8, 8), *(nn.Linear(8, 8) for _ in range(4))]
    freezing = dynmo.Freezing(schedule=((0, 4),), cache_bytes=cache)
    pipeline = make(world, made, cases=[freezing])
    losses = list[float]()
    for step in range(4):
        if step == 2 and 0 in pipeline.mesh.modules:
            pipeline.mesh.modules[0].eval()
        losses.append(pipeline.step(*batch(0), samples=list(range(MICROBATCHES))).loss)
    return losses


def rates(world: dynmo.World) -> list[float]:
    """Changes the dropout of layer 2 where it is, and moves it there and back."""
    pipeline = make(world, layers(), balance="none", schedule="1f1b")
    losses = list[float]()
    for step, (rate, partition) in enumerate([(0.1, [1, 4]), (0.3, [4, 1]), (0.5, [1, 4])]):
        losses.append(pipeline.step(*batch(step)).loss)
        if (layer := pipeline.mesh.modules.get(2)) is not None:
            dropout: Any = layer.get_submodule("dropout.0")
            dropout.p = rate
        if world.size > 1:
            pipeline.move(partition)
    return [*losses, pipeline.step(*batch(3)).loss]
