"""Jobs of the pool's ranks for the tests of post-validation."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from dynmo.balance.partition import uniform
from dynmo.config import parse
from dynmo.errors import DynmoError
from dynmo.pipeline.actions import Actions
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.engine import Engine, StepRecord
from dynmo.runtime.engine.norm_ring import NON_FINITE
from dynmo.runtime.engine.options import StepOptions, UpdateOptions
from dynmo.runtime.optim.loss_scale import LossScaler
from dynmo.schedule.catalogue import stage_ranks_of
from dynmo.train.setup import model_of
from tests.runtime.jobs.migrate import any_partition

PV_STEPS, MICROBATCHES = 7, 6


def _spoiled(pipeline: Engine, faults: list[list[Any]], now: list[int]) -> None:
    """Spoils gradients as they are looked at. Faults are [step, layer, "inf" or a factor]."""
    table = pipeline.optimizer_step.table  # pyright: ignore[reportPrivateUsage]
    own = table.own

    def spoil(*args: Any) -> Tensor:
        for step, layer, what in faults:
            if step == now[0] and layer in pipeline.store.own:
                gradients = [
                    p.grad for p in pipeline.store.own[layer][0].parameters() if p.grad is not None
                ]
                if not gradients:  # it is frozen
                    continue
                if what == "inf":
                    gradients[0].view(-1)[0] = float("inf")
                else:
                    torch._foreach_mul_(gradients, what)
        return own(*args)

    table.own = spoil  # pyright: ignore[reportAttributeAccessIssue]


def _made(world: World, schedule: str, kind: str, update: UpdateOptions) -> Engine:
    """Makes a pipeline with a loss scale, so that an overflow skips its step."""
    gpt = {"blocks": 3, "hidden": 16, "heads": 2, "sequence": 4, "dropout": 0.1}
    model = model_of(parse({"model": gpt if kind == "gpt" else {"kind": f"python:{kind}"}}))
    stages = len(stage_ranks_of(schedule, world.size))
    pipeline = Engine(
        world, model, uniform(model.layers, stages), StepOptions(schedule, MICROBATCHES), update
    )
    pipeline.optimizer_step.scaler = LossScaler(2.0**16, window=1 << 30)
    return pipeline


def validated(
    world: World,
    schedule: str,
    faults: list[list[Any]],
    changes: bool = False,
    kind: str = "gpt",
    limit: float = 20.0,
    **update: Any,
) -> dict[str, Any]:
    """Some steps with spoiled gradients. With `changes`, layers freeze and move in between."""
    pipeline = _made(world, schedule, kind, UpdateOptions(**update))
    layers, stages = pipeline.model.layers, len(pipeline.store.layout.stage_ranks)
    now = [0]
    _spoiled(pipeline, faults, now)
    random = Random(stages)
    results: list[StepRecord] = []
    seen: list[Any] = []
    for step in range(PV_STEPS):
        if changes and step % 3 == 2:
            if step == 5:
                Actions(pipeline).freeze([0, 1])
            Actions(pipeline).move(any_partition(layers, stages, random))
            seen.append(pipeline.digest())
        now[0] = step
        tokens = torch.randint(
            256, (MICROBATCHES, 1, 5), generator=torch.Generator().manual_seed(step)
        )
        results += pipeline.advance(
            step, tokens[..., :-1], tokens[..., 1:], lr=0.01, max_norm=limit
        )
        if changes and step % 3 == 1:
            seen.append(pipeline.evaluate(tokens[..., :-1], tokens[..., 1:], MICROBATCHES))
    results += pipeline.drain()
    failed = pipeline.optimizer_step.failed  # pyright: ignore[reportPrivateUsage]
    return {
        "steps": [r.step for r in results],
        "losses": [r.loss for r in results],
        "norms": [r.squared_norms for r in results],
        "rollbacks": [[r.step, r.rollback.what] for r in results if r.rollback],
        # The failure of each step, as the pipeline itself sees it afterwards. A skipped step tells
        # no norms.
        "failed": [
            NON_FINITE if r.skipped else failed(r.loss, r.squared_norms, limit) for r in results
        ],
        "digest": pipeline.digest(),
        "seen": seen,
    }


def validated_raises(world: World, schedule: str, fault: str) -> dict[str, Any]:
    """A step that ends the run, after others. Then it runs again, without the fault."""
    whole = model_of(parse({"model": {"blocks": 3, "hidden": 16, "heads": 2, "sequence": 4}}))
    pipeline = Engine(
        world,
        whole,
        uniform(8, world.size),
        StepOptions(schedule, microbatches=6),
        update=UpdateOptions(post_validation=True),
    )
    now = [0]
    _spoiled(pipeline, [[2, 7, "inf"]] if fault == "overflow" else [], now)
    tokens = torch.randint(256, (6, 1, 5), generator=torch.Generator().manual_seed(0))
    digests: list[str] = []
    error = ""
    for now[0] in (0, 1, 2, 3, 4, 5):
        try:
            if now[0] == 2:
                digests.append(pipeline.digest())
            differs = fault == "batch" and not error and now[0] == 2 and world.rank == 2
            given = tokens.roll(1) if differs else tokens
            pipeline.advance(now[0], given[..., :-1], given[..., 1:], lr=0.01)
        except DynmoError as caught:
            error = str(caught)
            digests.append(pipeline.digest())
    return {"error": error, "digests": [*digests, pipeline.digest()]}
