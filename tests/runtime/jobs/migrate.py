"""Jobs of the pool's ranks for the tests of moving layers."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.balance.partition import Move, Partition, moves
from dynmo.config import parse
from dynmo.errors import RunError
from dynmo.kernels.seeds import mix
from dynmo.runtime.comm.headers import TAG_MIGRATE
from dynmo.runtime.comm.world import World
from dynmo.runtime.optim.optimizer import LayerOptimizer, OptimizerSettings
from dynmo.runtime.state.migration import Arrival, _receive_text, contents, exchange, fill
from dynmo.train.setup import model_of
from tests.runtime.jobs.executor import bits_of


def fingerprint(
    module: nn.Module, optimizer: LayerOptimizer, gradients: bool = True
) -> dict[str, Any]:
    """Dtype, shape and bits of each tensor of a layer, and which parameters train."""
    out: dict[str, Any] = {}
    for (section, name), t in contents(module, optimizer.state()).items():
        if gradients or section != "gradient":
            out[f"{section} {name}"] = [str(t.dtype), list(t.shape), bits_of(t)]
    return out | {f"trains {name}": p.requires_grad for name, p in module.named_parameters()}


class Held:
    """The layers of one rank, as little as moving them needs."""

    def __init__(self, world: World, kind: dict[str, Any], partition: Partition) -> None:
        self.world, self.partition = world, partition
        self.model = model_of(parse({"model": kind}))
        own = partition.range_of(world.rank)
        self.modules = self.model.build(frozenset(own))
        for index in range(0, self.model.layers, 3):
            self.modules[index].requires_grad_(False)
        self.optimizers = {i: LayerOptimizer(self.modules[i], OptimizerSettings()) for i in own}

    def train(self, step: int) -> None:
        """Gradients from nowhere, one update, and gradients left behind."""
        for index, optimizer in self.optimizers.items():
            for last in (False, True):
                random = torch.Generator().manual_seed(mix(step, index, last))
                for p in self.modules[index].parameters():
                    p.grad = torch.randn(p.shape, generator=random) if p.requires_grad else None
                if not last:
                    optimizer.step(0.1, 1.0)
                    optimizer.drop_gradients()

    def fingerprints(self) -> dict[int, Any]:
        return {i: fingerprint(self.modules[i], o) for i, o in self.optimizers.items()}

    def leaving(self, index: int) -> tuple[nn.Module, dict[str, Tensor]]:
        return self.modules[index], self.optimizers[index].state()

    def move(self, target: Partition, leaving: Any = None) -> int:
        plan = moves(self.partition, target)

        def adopt(arrivals: list[Arrival]) -> None:
            for move in plan:
                if move.source == self.world.rank:
                    self.modules[move.layer].zero_grad()
                    self.modules[move.layer] = self.modules[move.layer].to("meta")
                    del self.optimizers[move.layer]
            for arrival in arrivals:
                state = fill(self.modules[arrival.layer], arrival.tensors, arrival.flags)
                self.optimizers[arrival.layer] = LayerOptimizer(
                    self.modules[arrival.layer], OptimizerSettings()
                )
                self.optimizers[arrival.layer].load(state)

        migration = exchange(self.world, plan, leaving or self.leaving, adopt)
        self.partition = target
        return migration.moved_bytes


def any_partition(layers: int, ranks: int, random: Random) -> Partition:
    return Partition.from_bounds([0, *sorted(random.sample(range(1, layers), ranks - 1)), layers])


def migrate(world: World, kind: dict[str, Any], seed: int, rounds: int) -> dict[str, Any]:
    """Moves layers between random placements, with an update and gradients before each move."""
    random = Random(seed)
    layers = model_of(parse({"model": kind})).layers
    held = Held(world, kind, any_partition(layers, world.size, random))
    moved = 0
    for step in range(rounds):
        held.train(step)
        moved += held.move(any_partition(layers, world.size, random))
        assert sorted(held.optimizers) == list(held.partition.range_of(world.rank))
    return {"layers": held.fingerprints(), "moved": moved}


def migrate_fails(world: World, how: str) -> dict[str, Any]:
    """One rank fails while layers move from (3, 1, 2) to (1, 2, 3)."""
    kind = {"kind": "gpt", "blocks": 2, "hidden": 16, "heads": 2, "sequence": 4}
    held = Held(world, kind, Partition((3, 1, 2)))
    held.train(0)
    before = held.fingerprints()

    def leaving(index: int) -> tuple[nn.Module, dict[str, Tensor]]:
        if index == 2 and how == "source":
            raise RunError("layer 2 will not go")
        module, state = held.leaving(index)
        if index == 2 and how == "dtype":
            module = nn.Linear(2, 2)
            module.register_buffer("odd", torch.zeros(2).to(torch.float8_e5m2))
        if index == 3 and how == "memory":
            state = {"huge": torch.zeros(1).expand(1 << 50)}
        return module, state

    try:
        held.move(Partition((1, 2, 3)), leaving)
        error = ""
    except RunError as caught:
        error = str(caught)
    untouched = held.fingerprints() == before and held.partition == Partition((3, 1, 2))
    held.move(Partition((1, 2, 3)))  # and the world is as good as before
    return {"error": error, "untouched": untouched, "after": sorted(held.optimizers)}


def announces(world: World, length: int) -> str:
    """Rank 0 announces a manifest of this length to rank 1. Returns what that says."""
    if world.rank == 0:
        world.wait(world.send(torch.tensor([length]), 1, TAG_MIGRATE), 1, "room to send")
        return ""
    try:
        _receive_text(world, Move(2, 0, 1))
    except RunError as error:
        return str(error)
    return ""
