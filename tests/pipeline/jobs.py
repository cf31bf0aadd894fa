"""Jobs of the ranks of `test_pipeline.py`. Each returns JSON."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

import dynmo
from dynmo.errors import InputError, NoRoomError, RunError
from dynmo.events import Event
from dynmo.pipeline.options import grouped
from dynmo.runtime.state import migration

BATCH = 8


def layers(seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)]


def batch(
    step: int, rows: int = BATCH, inputs: int = 4, targets: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    first = torch.randn(rows, inputs, generator=generator)
    return first, torch.randn(rows, targets, generator=generator)


def make(
    world: dynmo.World, modules: list[nn.Module] | None = None, **options: Any
) -> dynmo.Pipeline:
    model = dynmo.Sequential(modules or layers(), loss=nn.functional.mse_loss)
    return dynmo.Pipeline(
        model, world, **grouped({"microbatches": 4, "schedule": "zb-h1"} | options)
    )


def train(world: dynmo.World, replicas: int = 1) -> dict[str, Any]:
    """Trains with `dynmo.Pipeline`. Ranks between the first and the last stage give no data."""
    pipeline = make(world, microbatches=4 // replicas, replicas=replicas)
    mine = pipeline.mesh.modules

    def own(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch(step)
        return inputs.chunk(replicas)[pipeline.mesh.replica], targets.chunk(replicas)[
            pipeline.mesh.replica
        ]

    losses: list[float] = []
    for step in range(4):
        inputs, targets = own(step)
        given = (inputs if 0 in mine else None, targets if 3 in mine else None)
        losses.append(pipeline.step(*given).loss)
    return {
        "layers": sorted(mine),
        "losses": losses,
        "evaluated": pipeline.evaluate(*own(0)),
        "weights": pipeline.digest(),
    }


def odd_layers() -> list[nn.Module]:
    """The older weight norm, which sets a tensor that torch cannot copy, and layers of no width."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [
            nn.Embedding(16, 0),
            nn.Linear(0, 4),
            nn.utils.weight_norm(nn.Linear(4, 4)),
            nn.Linear(4, 0),
            nn.Linear(0, 16),
        ]


def lengths(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [8, length] with another length at most steps."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(16, (BATCH, 3 + step // 2 % 3), generator=generator)
    return ids, ids.roll(1, 1)


def train_odd_layers(world: dynmo.World) -> dict[str, Any]:
    """Returns the losses and the digest of the weights."""
    optimizer = dynmo.SGD(lr=0.1, momentum=0.9)
    pipeline = dynmo.Pipeline(
        dynmo.Sequential(odd_layers()), world, microbatches=4, optimizer=optimizer
    )
    losses = [pipeline.step(*lengths(step)).loss for step in range(6)]
    if world.size > 1:
        pipeline.move([2, 3])
        pipeline.move([3, 2])
    losses += [pipeline.step(*lengths(step)).loss for step in range(6)]
    return {"losses": losses, "weights": pipeline.digest()}


def first_placement(world: dynmo.World) -> list[int]:
    balance = dynmo.Balance(balancer="none", initial=(3, 1))
    return list(make(world, balance=balance).mesh.partition.counts)


def uncounted(world: dynmo.World, **options: Any) -> list[Any]:
    """Returns the errors of a batch without any counted target, and whether all weights stayed."""
    torch.manual_seed(0)
    model = dynmo.Sequential([nn.Embedding(16, 4), nn.Linear(4, 16)])
    pipeline = dynmo.Pipeline(model, world, microbatches=4, **grouped(options))
    before, told = pipeline.digest(), list[Any]()
    ids, targets = lengths(0)
    targets[:] = -100
    forms: list[Any] = [(ids, targets), ({"input": ids, "labels": targets},)]
    for given in forms:
        with pytest.raises(dynmo.DynmoError) as refused:
            pipeline.step(*given)
        told.append(str(refused.value))
    return [*told, pipeline.digest() == before]


def seeded_otherwise(world: dynmo.World) -> str:
    """Each rank makes its layers under a seed of its own."""
    with pytest.raises(InputError) as refused:
        make(world, layers(seed=world.rank))
    return str(refused.value)


def sharded(world: dynmo.World, by: str, replicas: int = 1) -> dict[str, Any]:
    """Trains one step on one batch, then a step and an evaluation get batches drawn by `by`.

    This is "rank", "replica", "targets" (those alone are drawn by rank), or "middle" (rank 1 alone
    has another batch). A last step has one batch again.
    """
    pipeline = make(world, microbatches=2, replicas=replicas)
    pipeline.step(*batch(0))
    seeds = {"replica": world.rank % replicas, "middle": int(world.rank == 1)}
    inputs, targets = batch(seeds.get(by, world.rank))
    given = (batch(0)[0] if by == "targets" else inputs, targets)
    before, errors = pipeline.digest(), list[str]()
    for call in (pipeline.step, pipeline.evaluate):
        try:
            call(*given)
        except InputError as error:
            errors.append(str(error))
    after = pipeline.digest()
    loss = pipeline.step(*batch(1)).loss
    return {"errors": errors, "digests": [before, after], "loss": loss}


def threaded(world: dynmo.World) -> list[Any]:
    """Calls `dynmo.init` with another number of threads on each rank, and then with one number."""
    del world
    before, own = torch.get_num_threads(), torch.distributed.get_rank() + 1
    with pytest.raises(InputError) as refused, dynmo.init(device="cpu", threads=own):
        pass
    with dynmo.init(device="cpu", threads=2):
        threads = torch.get_num_threads()
    return [str(refused.value), threads, torch.get_num_threads() - before]


def held_groups(world: dynmo.World) -> str:
    """Returns the default arguments of a function of a module that an optimizer imports."""
    del world
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
    return repr(importlib.import_module("torch.distributed.nn.functional").broadcast.__defaults__)


def reshaped(world: dynmo.World) -> dict[str, Any]:
    """Trains a loop whose mesh changes: one pipeline of all ranks, then as many replicas."""
    told: list[Event] = []
    plan = [(2, 1, world.size)] if world.size > 1 else []
    pipeline = make(
        world,
        reduction_slots=2,
        elastic=dynmo.Elastic(reshape_at=plan),
        cases=[dynmo.Freezing(schedule=[(3, 1)])],
        steps=5,
        listen=told.append,
    )
    losses, shapes = list[float](), list[tuple[int, int]]()
    while pipeline.steps < 5:
        pipeline.adapt()  # before the loop chooses the batch of its replica
        share = BATCH // pipeline.mesh.shape[1]
        part = slice(pipeline.mesh.replica * share, (pipeline.mesh.replica + 1) * share)
        inputs, targets = batch(pipeline.steps)
        shapes.append(pipeline.mesh.shape)
        losses.append(pipeline.step(inputs[part], targets[part]).loss)
    pipeline.close()
    events = [event.event for event in told]
    return {"losses": losses, "shapes": shapes, "digest": pipeline.digest(), "events": events}


def deep_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    first: list[nn.Module] = [nn.Linear(4, 8)]
    return [*first, *(nn.Linear(8, 8) for _ in range(6)), nn.Dropout(0.2), nn.Linear(8, 3)]


def changing_shape(
    world: dynmo.World,
    shapes: list[list[Any]],
    folder: str | None = None,
    replicas: int = 1,
    post_validation: bool = False,
    refuses: bool = False,
) -> dict[str, Any]:
    """Trains nine layers. Each step runs another schedule and placement.

    Args:
        shapes: Schedule and layers of each stage, one pair a step.
        folder: Where to save at the end. Another pipeline then goes on from there for two steps.
        refuses: Whether the first change of the schedule is tried without room before.
    """

    def deep(**more: Any) -> dynmo.Pipeline:
        return make(
            world,
            deep_layers(),
            microbatches=4 // replicas,
            schedule="auto",
            replicas=replicas,
            reduction_slots=2,
            balance="none",
            max_grad_norm=0.5,
            post_validation=post_validation,
            **more,
        )

    def own(step: int) -> list[torch.Tensor]:
        return [x.chunk(replicas)[pipeline.mesh.replica] for x in batch(step)]

    def advance(step: int) -> None:
        results.extend(pipeline.advance(*(own(step) if pipeline.needs_data else ())))

    pipeline, results, names = deep(), list[dynmo.StepResult](), list[str]()
    refused = list[str]()
    for step, (name, counts) in enumerate(shapes):
        if world.size > 1:
            if refuses and not refused and name != pipeline.mesh.schedule.name:
                refused = _refused(pipeline, name, counts)
            pipeline.move(counts, name)
        names.append(pipeline.mesh.schedule.name)
        advance(step)
    results += pipeline.drain()
    evaluated = pipeline.evaluate(*own(99))
    if folder is not None:
        pipeline.save(folder)
        pipeline = deep(resume=folder)
        names.append(pipeline.mesh.schedule.name)
        for step in range(len(shapes), len(shapes) + 2):
            advance(step)
        results += pipeline.drain()
    return {
        "names": names,
        "stages": pipeline.mesh.partition.counts,
        "losses": [result.loss for result in results],
        "norms": [result.gradient_norm for result in results],
        "evaluated": evaluated,
        "weights": pipeline.digest(),
        "refused": refused,
    }


def _refused(pipeline: dynmo.Pipeline, name: str, counts: list[int]) -> list[str]:
    """Changes that fail, by the memory of all ranks and by that of the last one.

    Everything is then as before.
    """
    engine = pipeline._engine
    layouts, last = engine.layouts, engine.store.world.size - 1

    def state() -> list[Any]:
        layout = engine.store.layout
        return [layout, pipeline.mesh.schedule, sorted(pipeline.mesh.modules), pipeline.digest()]

    def no_room(*_: object) -> Any:
        raise NoRoomError("no room")

    before, told = state(), list[str]()
    room = no_room if engine.store.world.rank == last else migration.room_for
    with mock.patch.object(migration, "room_for", room):
        for rule in (no_room, ()):
            engine.layouts = replace(layouts, recompute=rule)
            with pytest.raises((NoRoomError, RunError)) as error:
                pipeline.move(counts, cast(Any, name))
            told.append(str(error.value))
            assert state() == before
    engine.layouts = layouts
    return told


def resumed_otherwise(world: dynmo.World, folder: str) -> dict[str, Any]:
    """Goes on from a checkpoint of `changing_shape` for one step, with one stage a rank."""
    pipeline = make(world, deep_layers(), reduction_slots=2, resume=folder)
    pipeline.step(*batch(2))
    return {"name": pipeline.mesh.schedule.name, "weights": pipeline.digest()}
