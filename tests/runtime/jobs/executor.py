"""Jobs of the pool's ranks for the tests of the executor."""

from __future__ import annotations

import hashlib
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels.seeds import mix
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.executor import WAIT, Executor
from dynmo.runtime.engine.stage_streams import StageStreams
from dynmo.runtime.layer.accumulation import AccumulationGroups
from dynmo.runtime.layer.split_backward import Layer
from dynmo.runtime.layer.stage import Stage
from dynmo.schedule.lowering import Channel, lower
from dynmo.schedule.op import Schedule, from_text
from tests.schedule.samples import wander


def _small_layer(index: int, count: int) -> nn.Module:
    torch.manual_seed(mix(9, index))
    if index == 0:
        return nn.Embedding(11, 6)
    if index == count - 1:
        return nn.Linear(6, 11)
    return nn.Sequential(
        nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6)
    )


class Late(Transport):
    """Says of messages at random that they are late. So pieces of W run wherever they may."""

    random = Random(0)

    def arrived(self, channel: Channel, microbatch: int, timeout: float) -> bool:
        return self.random.random() < 0.5 and super().arrived(channel, microbatch, 0.0)


def _stages(
    order: Schedule, rank: int, layers: int, microbatches: int, groups: int, ended: list[int]
) -> dict[int, Stage]:
    """Makes the stages of a rank. `ended` takes the layers in the order in which they end."""
    each = layers // order.stages
    first = order.first_trainable * each

    def layer(index: int) -> Layer:
        module = _small_layer(index, layers).requires_grad_(index >= first)
        parameters, done = list(module.parameters()), partial(ended.append, index)
        accumulation = AccumulationGroups(parameters, microbatches, groups, done)
        return Layer(index, module, HostClock(), 4, groups=accumulation)

    return {
        s: Stage(
            [layer(i) for i in range(s * each, (s + 1) * each)],
            first,
            functional.cross_entropy if s == order.stages - 1 else None,
            1 / microbatches,
        )
        for s in order.stages_of(rank)
    }


def execute(
    world: World,
    schedule: Any,
    layers: int,
    microbatches: int,
    frozen: int = 0,
    late: int | None = None,
    groups: int = 1,
) -> dict[str, Any]:
    """Two steps of a text or of a random schedule [placement, seed], with equal stages.

    With the seed `late`, messages are late and pieces of W run ahead.
    """
    order = (
        from_text(schedule)
        if isinstance(schedule, str)
        else wander(schedule[0], microbatches, frozen, Random(schedule[1]))
    )
    programs = lower(order)
    ended: list[int] = []
    stages = _stages(order, world.rank, layers, microbatches, groups, ended)
    Late.random = Random(late)
    ends = (Transport if late is None else Late)(world, programs)
    timeout = None if late is None else 3e-4
    executor = Executor(programs[world.rank], stages, ends, HostClock(), StageStreams(), timeout)
    random = torch.Generator().manual_seed(1)
    losses: list[float] = []
    own = [layer for stage in stages.values() for layer in stage.layers]
    gradients: dict[str, list[str | None]] = {}
    ahead = 0
    for step in range(2):
        inputs = torch.randint(11, (microbatches, 4), generator=random)
        step_output = executor.run(step, inputs, inputs.flip(0))
        assert not any(loss.requires_grad for loss in step_output.losses), (
            "a loss keeps its graph, and what that has not saved"
        )
        losses.append(
            float(torch.stack(step_output.losses).double().mean()) if step_output.losses else 0.0
        )
        for layer in own:
            for name, p in layer.module.named_parameters():
                found = None if p.grad is None else bits_of(p.grad)
                gradients.setdefault(f"{layer.index}.{name}", []).append(found)
                p.grad = None
        ahead += sum((a.kind, b.kind) == (WAIT, "W") for a, b in pairwise(step_output.intervals))
    executor.close()
    return {
        "losses": losses if order.stage_ranks[-1] == world.rank else None,
        "gradients": gradients,
        "left": sum(len(layer._saved) + len(layer._weight_work) for layer in own),
        "ended": ended,
        "ahead": ahead,
    }


def bits_of(tensor: Tensor) -> str:
    return hashlib.sha256(
        tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()
