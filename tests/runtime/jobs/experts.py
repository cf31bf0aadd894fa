"""Jobs of the pool's ranks for the tests of experts spread over replicas."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynmo.errors import RunError
from dynmo.models.experts import halves
from dynmo.runtime.comm.expert_group import ExpertGroup
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.accumulation import Tree
from dynmo.runtime.optim.expert_reduction import SharedExpert, reduce_experts
from dynmo.runtime.optim.gradient_reduction import drop_missing
from dynmo.runtime.optim.optimizer import Share, cut
from dynmo.train.setup import model_of
from dynmo.train.trainer import Trainer
from tests.jobs import parsed
from tests.runtime.jobs.world import lose_patience


def holdings(world: World, config: dict[str, Any]) -> dict[str, Any]:
    """The experts of each layer that are here after a run, and the bytes of all layers."""
    loaded = parsed(config)
    trainer = Trainer(loaded, world, model_of(loaded), None)
    trainer.run()
    held = {
        index: [expert for expert, weight in enumerate(half.gate_up.weights) if weight is not None]
        for index, (module, _) in trainer.pipeline._engine.store.own.items()
        for half in halves(module)
    }
    costs = trainer.pipeline.costs()
    return {
        "held": held,
        "bytes": [[c.weight_bytes, c.gradient_bytes, c.optimizer_bytes] for c in costs],
    }


def peer_is_late(world: World) -> list[Any]:
    """Rank 1 sends no rows: the wait of rank 0 has an end and a name."""
    group = ExpertGroup(arrange(world, 2), 2)
    lose_patience(group.world)
    try:
        if world.rank == 1:
            world.store.wait(["named"])
        else:
            group.rows(torch.zeros(2, 4), [1, 1], [1, 1])
    except RunError as error:
        return [type(error).__name__, str(error)]
    finally:
        world.store.set("named", "1")
        world.close()
    return []


def rows(world: World, dtype: str) -> list[list[float]]:
    """Rank r sends s + 1 rows of r to rank s. Returns what arrived."""
    group = ExpertGroup(arrange(world, world.size), world.size)
    sent = [rank + 1 for rank in range(world.size)]
    own = torch.full((sum(sent), 2), float(world.rank), dtype=getattr(torch, dtype))
    taken = group.counts([[count] for count in sent], [1] * world.size)
    return group.rows(own, sent, [count for (count,) in taken]).tolist()


def reduced(world: World, bucket: int, absent: list[int]) -> list[Any]:
    """Two experts: one on replicas 0 and 2, one on replica 1. True for each correct local sum."""
    peers, size = arrange(world, 4).peers, 40_000
    spread_over: list[tuple[tuple[int, ...], ...]] = [
        ((0, 1), (), (2, 3), ()),
        ((), (0, 1, 2, 3), (), ()),
    ]
    experts: list[SharedExpert] = []
    for number, sources in enumerate(spread_over):
        holders = [replica for replica, of in enumerate(sources) if of]
        ranges = [(0, 0)] * 4
        for place, replica in enumerate(holders):
            (ranges[replica],) = cut([size], Share(place, len(holders)))
        copies = {source: nn.Parameter(torch.zeros(size)) for source in sources[peers.rank]}
        for source, copy in copies.items():
            copy.grad = None if source in absent else _gradient(number, source, size)
        own = next(iter(copies.values()), nn.Parameter(torch.zeros(size)))
        experts.append(
            SharedExpert(f"e{number}", own, tuple(ranges), True, bool(copies), copies, sources)
        )
    missing = reduce_experts(peers, 0, experts, bucket)
    drop_missing(missing)
    out: list[Any] = []
    for number, expert in enumerate(experts):
        tree = Tree()
        for source in range(4):
            tree.put(source, None if source in absent else _gradient(number, source, size))
        total = tree.total(4)
        if expert.held:
            grad = expert.parameter.grad
            out.append(
                grad is None if total is None else grad is not None and torch.equal(grad, total)
            )
    return out


def _gradient(expert: int, source: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(10 * expert + source))
