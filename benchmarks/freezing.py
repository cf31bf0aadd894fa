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

from benchmarks.harness import main, run_ranks
from dynmo.balance.partition import Partition, exact, uniform
from dynmo.config import parse
from dynmo.cost.layer_cost import Costs
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.models.registry import load_model
from dynmo.pipeline.engine import Engine
from dynmo.runtime.comm.world import World
from dynmo.schedule.simulator import simulate


def balanced(
    world: World, pairs: int, steps: int, blocks: int, hidden: int, sequence: int, microbatches: int
) -> dict[str, Any]:
    """Runs on each rank: the static and the balanced placement, in turn.

    Args:
        world: The ranks.
        pairs: Number of turns of both placements.
        steps: Number of counted steps on a placement in each turn.
        blocks: Depth of the model.
        hidden: Width of the model.
        sequence: Tokens of a sequence.
        microbatches: Microbatches of a step.
    """
    config = parse(
        {
            "model": {"blocks": blocks, "hidden": hidden, "heads": 4, "sequence": sequence},
            "train": {"global_batch": 2 * microbatches, "micro_batch": 2},
        }
    )
    model = load_model(config)
    batches = Batches(open_corpus("stdlib"), sequence, 2 * microbatches, 2, 0)
    static = uniform(model.layers, world.size)
    pipeline = Engine(world, model, static, schedule="zb-h1", microbatches=microbatches)
    counter = 0

    def run(count: int) -> list[float]:
        nonlocal counter
        times: list[float] = []
        for _ in range(count):
            world.barrier("the step to start")
            start = time.perf_counter()
            pipeline.step(counter, *batches.train(counter), lr=3e-4, max_norm=1.0)
            seconds = torch.zeros(world.size, dtype=torch.float64)
            seconds[world.rank] = time.perf_counter() - start
            times.append(float(world.sum(seconds, "the step to end").max()))
            counter += 1
        return times

    run(2)
    pipeline.freeze(range(model.layers // 2))
    run(3)
    target = exact([cost.seconds for cost in pipeline.costs()], world.size, current=static)
    moved: list[dict[str, float]] = []

    def place(partition: Partition) -> None:
        migration = pipeline.move(partition)
        moved.append({"bytes": migration.moved_bytes, "seconds": migration.seconds})

    costs = pipeline.costs()
    sides: list[tuple[float, float]] = []
    idle: list[tuple[float, float]] = []
    for _ in range(pairs):
        place(target)
        fast = run(steps + 1)[1:]  # the first step after a move opens channels
        costs = pipeline.costs()
        idle_fast = pipeline.predict(costs, target).idle_ratio
        place(static)
        slow = run(steps + 1)[1:]
        sides.append((median(slow), median(fast)))
        idle.append((pipeline.predict(costs, static).idle_ratio, idle_fast))

    def span(partition: Partition) -> float:
        stages = pipeline.schedule_keeper.stage_costs(costs, partition)
        schedule = pipeline.schedule_for(partition)
        return simulate(schedule, Costs(stages.stages, (0.0,) * len(stages.links))).makespan

    ratios = [slow / fast for slow, fast in sides]
    return {
        "speedup": median(ratios),
        "ideal": span(static) / span(target),
        "pairs": ratios,
        "static_seconds": median(s for s, _ in sides),
        "balanced_seconds": median(f for _, f in sides),
        "static_layers": list(static.counts),
        "balanced_layers": list(target.counts),
        "frozen_layers": model.layers // 2,
        "simulated_idle_static": median(s for s, _ in idle),
        "simulated_idle_balanced": median(f for _, f in idle),
        "moves": moved,
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
