"""Half of a GPT's layers frozen as a prefix: balanced, and balanced in a V, over static-uniform.

It runs on two ranks of real compute, one thread each. One run holds all sides. The layers are moved
to and fro between the static placement, the balanced one (both by ZB-H1) and the one in a V (by
v-auto), a few steps on each, round after round. All sides thus meet the same machine. Steps are
whole ones: forward, backward, agreement, clipping, AdamW. The ideal is the simulator's, from the
layers' measured costs without links: the gain of a perfect executor with this placement.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from benchmarks.cost_traces import profile_of
from benchmarks.harness import run_ranks, run_step
from benchmarks.output import main
from dynmo.config import parse
from dynmo.cost.layer_cost import Costs, LayerCost
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.pipeline.actions import Actions
from dynmo.plan.bisection import exact
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.placement import place
from dynmo.plan.problem import Mesh, Problem
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.simulator import simulate
from dynmo.train.setup import model_of


class TimedPipeline:
    """A pipeline whose steps are timed.

    Attributes:
        pipeline: The engine.
        moves: Bytes and seconds of each move.
    """

    def __init__(self, world: Meeting, pipeline: Engine, batches: Batches) -> None:
        self.pipeline, self._world, self._batches = pipeline, world, batches
        self.moves: list[dict[str, float]] = []
        self._steps = 0

    def run(self, count: int) -> list[float]:
        """Runs so many steps, and returns the seconds of each on the slowest rank."""
        return [self._step() for _ in range(count)]

    def _step(self) -> float:
        world = self._world
        world.barrier("the step to start")
        start = time.perf_counter()
        run_step(self.pipeline, self._steps, *self._batches.train(self._steps), 3e-4, 1.0)
        seconds = torch.zeros(world.size, dtype=torch.float64)
        seconds[world.rank] = time.perf_counter() - start
        self._steps += 1
        return float(world.sum(seconds, "the step to end").max())

    def run_on(self, partition: Partition, count: int, schedule: str | None = None) -> float:
        """Moves the layers, and returns the median seconds of the steps that follow."""
        migration = Actions(self.pipeline).move(partition, schedule)
        self.moves.append({"bytes": migration.moved_bytes, "seconds": migration.seconds})
        return median(self.run(count + 1)[1:])  # the first step after a move opens channels

    def makespan(self, costs: tuple[LayerCost, ...], partition: Partition) -> float:
        """Returns the simulated seconds of a step of the present schedule without link times."""
        stages = self.pipeline.schedule_maker.plan(partition, costs).costs
        schedule = self.pipeline.schedule_maker.on(partition)
        return simulate(schedule, Costs(stages.stages, (0.0,) * len(stages.links))).makespan


def balanced(
    world: Meeting,
    pairs: int,
    steps: int,
    blocks: int,
    hidden: int,
    sequence: int,
    microbatches: int,
) -> dict[str, Any]:
    """Runs on each rank: the static and the balanced placements, in turn."""
    config = parse(
        {
            "model": {"blocks": blocks, "hidden": hidden, "heads": 4, "sequence": sequence},
            "train": {"global_batch": 2 * microbatches, "micro_batch": 2},
        }
    )
    model = model_of(config)
    batches = Batches(open_corpus("stdlib"), sequence, 2 * microbatches, 2, 0)
    static = uniform(model.layers, world.size)
    options = EngineOptions("zb-h1", microbatches=microbatches, alternatives=("v-auto",))
    pipeline = Engine(world, model, static, options)
    actions, timed = Actions(pipeline), TimedPipeline(world, pipeline, batches)
    timed.run(2)
    actions.freeze(range(model.layers // 2))
    timed.run(3)
    costs = pipeline.costs()
    actions.replan(costs)
    sides = {
        "balanced": (exact([cost.seconds for cost in costs], world.size, current=static), "zb-h1"),
        "v": (_in_a_v(costs, world.size, microbatches), "v-auto"),
        "static": (static, "zb-h1"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    idle: dict[str, list[float]] = {name: [] for name in sides}
    makespans: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(pairs):
        for name, (partition, schedule) in sides.items():
            seconds[name].append(timed.run_on(partition, steps, schedule))
            costs = pipeline.costs()
            actions.replan(costs)
            timeline = pipeline.schedule_maker.plan(partition, costs).timeline
            idle[name].append(timeline.idle_ratio)
            makespans[name].append(timed.makespan(costs, partition))
    return {
        "static_seconds": median(seconds["static"]),
        "static_layers": list(static.counts),
        "frozen_layers": model.layers // 2,
        "simulated_idle_static": median(idle["static"]),
        **{
            name: {
                "seconds": median(seconds[name]),
                "layers": list(sides[name][0].counts),
                "schedule": sides[name][1],
                "simulated_idle": median(idle[name]),
                **_gains(seconds["static"], seconds[name], makespans["static"], makespans[name]),
            }
            for name in ("balanced", "v")
        },
        "moves": timed.moves,
        "layer_costs": [[cost.f, cost.b, cost.w] for cost in costs],
    }


def _in_a_v(costs: tuple[LayerCost, ...], ranks: int, microbatches: int) -> Partition:
    mesh = Mesh(ranks, 1, microbatches, 1, "v-auto")
    return place(Problem(profile_of(costs)), mesh).partition


def _gains(
    slow: list[float], fast: list[float], slow_ideal: list[float], fast_ideal: list[float]
) -> dict[str, Any]:
    rounds = [a / b for a, b in zip(slow, fast, strict=True)]
    speedup, ideal = median(rounds), median(slow_ideal) / median(fast_ideal)
    return {
        "speedup": speedup,
        "ideal": ideal,
        "reached": speedup / ideal,
        "rounds": rounds,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    return run_ranks(
        "benchmarks.freezing:balanced",
        2,
        pairs=options.pairs,
        steps=options.steps,
        blocks=12,
        hidden=256,
        sequence=128,
        microbatches=options.microbatches,
    )


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("pairs", 5, "rounds, in which the sides take turns"),
            ("steps", 4, "counted steps on each side of a round"),
            ("microbatches", 16, "of a step"),
        ],
    )
