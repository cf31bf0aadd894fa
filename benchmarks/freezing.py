"""Half of a GPT's layers frozen as a prefix: balanced over static-uniform.

It runs on two ranks of real compute, one thread each. One run holds both sides. The layers are
moved to and fro between the static and the balanced placement, a few steps on each, pair after
pair. Both sides thus meet the same machine. Steps are whole ones: forward, backward, agreement,
clipping, AdamW. The ideal is the simulator's, from the layers' measured costs without links: the
gain of a perfect executor with this placement.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch

from benchmarks.harness import run_ranks
from benchmarks.output import main
from dynmo.balance.partition import Partition, exact, uniform
from dynmo.config import parse
from dynmo.cost.layer_cost import Costs, LayerCost
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.pipeline.actions import Actions
from dynmo.runtime.comm.world import World
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.engine.options import StepOptions
from dynmo.schedule.simulator import simulate
from dynmo.train.setup import model_of


class TimedPipeline:
    """A pipeline whose steps are timed.

    Attributes:
        pipeline: The engine.
        moves: Bytes and seconds of each move.
    """

    def __init__(self, world: World, pipeline: Engine, batches: Batches) -> None:
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
        self.pipeline.step(self._steps, *self._batches.train(self._steps), lr=3e-4, max_norm=1.0)
        seconds = torch.zeros(world.size, dtype=torch.float64)
        seconds[world.rank] = time.perf_counter() - start
        self._steps += 1
        return float(world.sum(seconds, "the step to end").max())

    def run_on(self, partition: Partition, count: int) -> float:
        """Moves the layers, and returns the median seconds of the steps that follow."""
        migration = Actions(self.pipeline).move(partition)
        self.moves.append({"bytes": migration.moved_bytes, "seconds": migration.seconds})
        return median(self.run(count + 1)[1:])  # the first step after a move opens channels

    def span(self, costs: tuple[LayerCost, ...], partition: Partition) -> float:
        """Returns the simulated seconds of a step without link times."""
        stages = self.pipeline.schedule_keeper.stage_costs(costs, partition)
        schedule = self.pipeline.schedule_keeper.on(partition)
        return simulate(schedule, Costs(stages.stages, (0.0,) * len(stages.links))).makespan


def balanced(
    world: World, pairs: int, steps: int, blocks: int, hidden: int, sequence: int, microbatches: int
) -> dict[str, Any]:
    """Runs on each rank: the static and the balanced placement, in turn."""
    config = parse(
        {
            "model": {"blocks": blocks, "hidden": hidden, "heads": 4, "sequence": sequence},
            "train": {"global_batch": 2 * microbatches, "micro_batch": 2},
        }
    )
    model = model_of(config)
    batches = Batches(open_corpus("stdlib"), sequence, 2 * microbatches, 2, 0)
    static = uniform(model.layers, world.size)
    pipeline = Engine(world, model, static, StepOptions("zb-h1", microbatches=microbatches))
    timed = TimedPipeline(world, pipeline, batches)
    timed.run(2)
    Actions(pipeline).freeze(range(model.layers // 2))
    timed.run(3)
    target = exact([cost.seconds for cost in pipeline.costs()], world.size, current=static)
    costs = pipeline.costs()
    sides: list[tuple[float, float]] = []
    idle: list[tuple[float, float]] = []
    for _ in range(pairs):
        fast = timed.run_on(target, steps)
        costs = pipeline.costs()
        idle_fast = pipeline.schedule_keeper.predict(costs, target).idle_ratio
        slow = timed.run_on(static, steps)
        sides.append((slow, fast))
        idle.append((pipeline.schedule_keeper.predict(costs, static).idle_ratio, idle_fast))
    ratios = [slow / fast for slow, fast in sides]
    return {
        "speedup": median(ratios),
        "ideal": timed.span(costs, static) / timed.span(costs, target),
        "pairs": ratios,
        "static_seconds": median(s for s, _ in sides),
        "balanced_seconds": median(f for _, f in sides),
        "static_layers": list(static.counts),
        "balanced_layers": list(target.counts),
        "frozen_layers": model.layers // 2,
        "simulated_idle_static": median(s for s, _ in idle),
        "simulated_idle_balanced": median(f for _, f in idle),
        "moves": timed.moves,
        "layer_costs": [[cost.f, cost.b, cost.w] for cost in costs],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    result = run_ranks(
        "benchmarks.freezing:balanced",
        2,
        pairs=options.pairs,
        steps=options.steps,
        blocks=12,
        hidden=256,
        sequence=128,
        microbatches=options.microbatches,
    )
    return result | {"share_of_ideal": (result["speedup"] - 1) / (result["ideal"] - 1)}


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("pairs", 5, "alternating pairs"),
            ("steps", 4, "counted steps on each side of a pair"),
            ("microbatches", 16, "of a step"),
        ],
    )
