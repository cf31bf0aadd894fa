"""Layers with frozen weights and small adapters that train, for `test_masters.py`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dynmo
from dynmo.runtime.state.layer_store import LayerStore

BATCH = 9


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


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, 4, generator=generator), torch.randn(BATCH, 12, generator=generator)


def make(world: dynmo.World, **options: Any) -> dynmo.Pipeline:
    model = dynmo.Sequential(layers(), loss=nn.functional.mse_loss)
    return dynmo.Pipeline(model, world, microbatches=3, precision="bfloat16", **options)


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
        "optimizer_bytes": [cost.optimizer_bytes for cost in pipeline.costs()],
    }


def resume_frozen(world: dynmo.World, folder: str) -> str:
    """Trains a layer on two replicas, and resumes with the layer frozen. Returns the digest.

    One replica owns its only weight, with ZeRO-1.
    """
    digests = list[str]()
    for trains in (True, False):
        torch.manual_seed(0)
        layer, other = nn.Linear(4, 12, bias=False), nn.Linear(12, 12)
        model = dynmo.Sequential([layer.requires_grad_(trains), other], loss=nn.functional.mse_loss)
        pipeline = dynmo.Pipeline(
            model,
            world,
            microbatches=3,
            replicas=2,
            zero=1,
            precision="bfloat16",
            resume=None if trains else folder,
        )
        if trains:
            pipeline.step(*batch(0))
            pipeline.save(folder)
        digests.append(pipeline.digest())
    assert digests[0] == digests[1]
    return digests[0]
