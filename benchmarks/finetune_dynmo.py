"""The sides of dynmo in `benchmarks.finetune`, and the simulator's limit of each."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch

from benchmarks.harness import run_step, start_together
from benchmarks.noise import in_order
from benchmarks.ragged import Step
from dynmo.cost.layer_cost import LayerCost
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.plan.balancers import balancer
from dynmo.plan.partition import Partition
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.executor import SEND, WAIT
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.op import Kind, Op, Schedule

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "zb-auto")


class OwnSide:
    """An engine that runs ragged steps.

    Attributes:
        costs: The measured costs by which the schedule was made.
    """

    def __init__(self, engine: Engine, steps: Sequence[Step]) -> None:
        self.engine = engine
        self.costs = tuple[LayerCost, ...]()
        self._batches: list[tuple[Any, Any]] = [
            ([(ids,) for ids, _ in step], [labels for _, labels in step]) for step in steps
        ]
        self._seconds = [defaultdict[Op, list[float]](list) for _ in steps]

    @property
    def cut(self) -> Partition:
        return self.engine.store.layout.partition

    def run(self) -> float:
        """Returns the seconds of all steps on the slowest rank."""
        return sum(
            self._step(batch, seconds)
            for batch, seconds in zip(self._batches, self._seconds, strict=True)
        )

    def _step(self, batch: tuple[Any, Any], ops: dict[Op, list[float]]) -> float:
        engine = self.engine
        start = start_together()
        output = engine.programs.train(StepBatch(*batch), 0, 1.0)
        seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        engine.store.world.largest(seconds, "the step to end")
        for kind, stage, microbatch, begun, ended in output.intervals:
            known = None if kind in (WAIT, SEND) else engine.clock.seconds(begun, ended)
            if known is not None:
                ops[Op(Kind(kind), stage, microbatch)].append(known)
        engine.optimizer_step.discard()
        return seconds.item()

    def replan(self, costs: tuple[LayerCost, ...]) -> None:
        """Makes the schedule from measured costs. Measurements of ops begin anew."""
        self.costs = costs
        Actions(self.engine).replan(costs)
        for each in self._seconds:
            each.clear()

    def loss_and_norm(self) -> tuple[float, float]:
        """Returns the loss and the gradient norm of the first step. No weight changes."""
        record = run_step(self.engine, 0, *self._batches[0])
        return record.loss, record.norm

    def limit(self) -> float:
        """Returns the simulated seconds of all steps, from the seconds of each op."""
        maker = self.engine.schedule_maker
        schedule = maker.on(self.cut)
        links = maker.plan(self.cut, self.costs).costs.links
        return sum(replayed(schedule, self._everyones(x, schedule), links) for x in self._seconds)

    def _everyones(self, own: Mapping[Op, list[float]], schedule: Schedule) -> dict[Op, float]:
        """Returns the median seconds of each op, the same on every rank."""
        ops = [op for row in schedule.ops for op in row]
        table = torch.tensor([median(own.get(op) or [0.0]) for op in ops], dtype=torch.float64)
        self.engine.store.world.sum(table, "everyone's ops")
        return dict(zip(ops, table.tolist(), strict=True))


def own_side(
    world: Meeting,
    model: Model,
    schedule: str,
    cut: Partition,
    steps: Sequence[Step],
    costs: tuple[LayerCost, ...] | None = None,
) -> OwnSide:
    """Makes a side whose schedule rests on these costs, or else on costs that it measures."""
    engine = Engine(world, model, cut, EngineOptions(schedule, microbatches=len(steps[0])))
    side = OwnSide(engine, steps)
    if costs is None:
        for _ in range(2):
            side.run()
        costs = engine.costs()
    side.replan(costs)
    return side


def balanced(side: OwnSide) -> Partition:
    """Returns the placement that dynmo's own balancer proposes, by the costs of a side."""
    now = side.engine.schedule_maker.plan(side.cut, side.costs)
    return balancer("exact")(now.problem, now)


def replayed(schedule: Schedule, seconds: Mapping[Op, float], links: Sequence[float]) -> float:
    """Returns the time of a step whose microbatches differ, as the simulator counts it."""
    ended, clock = dict[Op, float](), [0.0] * schedule.ranks
    ranks = schedule.stage_ranks
    for rank, op, needs in in_order(schedule):
        start = clock[rank]
        for before, boundary in needs:
            arrived = ended[before]
            if boundary is not None and ranks[boundary] != ranks[boundary + 1]:
                arrived += links[boundary]
            start = max(start, arrived)
        clock[rank] = ended[op] = start + seconds[op]
    return max(clock)
