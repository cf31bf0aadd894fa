"""Layers with frozen weights and small adapters that train, for `test_masters.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dynmo
from dynmo.runtime.state.layer_store import LayerStore
from tests.pipeline import jobs


class Adapted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, 2, bias=False)
        self.up = nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 12).requires_grad_(False), *(Adapted(12) for _ in range(3))]


batch = partial(jobs.batch, rows=9, targets=12)


def make(
    world: dynmo.World, modules: list[nn.Module] | None = None, **options: Any
) -> dynmo.Pipeline:
    given = {"microbatches": 3, "precision": "bfloat16"} | options
    return jobs.make(world, modules or layers(), **given)


def store_of(pipeline: dynmo.Pipeline) -> LayerStore:
    return pipeline._engine.store


def masters(pipeline: dynmo.Pipeline) -> list[str]:
    """Returns the parameters of this rank that have a master."""
    own = store_of(pipeline).optimizers.items()
    return sorted(f"{index}.{name}" for index, optimizer in own for name in optimizer.masters)


def train(world: dynmo.World, folder: str, resumes: bool) -> dict[str, Any]:
    """Trains, moves, freezes and thaws adapters. Saves after step 3, or resumes from there."""
    pipeline = make(world, resume=folder if resumes else None)
    last = world.size - 1
    if not resumes:
        for step in range(3):
            pipeline.step(*batch(step))
            if last and step == 1:
                pipeline.move([1] * last + [4 - last])
            if step == 1:
                pipeline.freeze([1])
        pipeline.save(folder)
    saved = masters(pipeline)
    if last:
        pipeline.move([4 - last] + [1] * last)
    pipeline.unfreeze([1])
    losses = [pipeline.step(*batch(step)).loss for step in range(3, 5)]
    return {
        "saved": saved,
        "masters": masters(pipeline),
        "losses": losses,
        "weights": pipeline.digest(),
        "optimizer_bytes": [cost.optimizer_bytes for cost in pipeline.measured.costs()],
    }


def resume_frozen(world: dynmo.World, folder: str) -> str:
    """Trains a layer of one weight with ZeRO-1, and resumes with the layer frozen."""
    digests = list[str]()
    for trains in (True, False):
        torch.manual_seed(0)
        layer, other = nn.Linear(4, 12, bias=False), nn.Linear(12, 12)
        modules: list[nn.Module] = [layer.requires_grad_(trains), other]
        pipeline = make(world, modules, replicas=2, zero=1, resume=None if trains else folder)
        if trains:
            pipeline.step(*batch(0))
            pipeline.save(folder)
        digests.append(pipeline.digest())
    assert digests[0] == digests[1]
    return digests[0]
