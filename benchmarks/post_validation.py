"""A barrier at every step's end against post-validation, emulated.

Post-validation is section 4 of Zero Bubble. The figure is the time per step over many steps.

8 ranks' ops sleep four times as long as the paper's 28.3B model needs
(tests/facts/zero_bubble_table5.json: F 10.4, B 10.2, W 7.7 ms). A message between eight processes
on two cores takes far longer than between GPUs. Short ops would measure these messages, and this
benchmark is about the ends of steps. There are 3p microbatches, under zb-auto in twice the memory
of 1F1B (ZB-2p) and under ZB-H2. Sides take turns, a run of several steps each. A side's figure is
the median of its runs. A run's time per step counts from the end of its first step to the end of
its last, on the slowest rank. So neither filling the pipeline nor emptying it counts.

The limit is the simulator's figure for one step: the makespan with a barrier, the span without.
Wanted: at most 3 % over the span. The paper's authors report that a synchronous optimizer is 8.8 %
slower on average.

A rollback's cost is measured with a limit on the gradient norm, at every so many steps. The norms
of the first ranks keep the limit, and all together do not. These ranks have stepped, roll back,
step again, and run their warm-up again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.harness import alternate, medians, run_ranks, run_step
from benchmarks.output import main
from benchmarks.published import table_5
from dynmo.models.emulated import make_layers
from dynmo.pipeline.actions import Actions
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch, StepSettings
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions

MESSAGE_BYTES = 16384
SCHEDULES = ("zb-auto", "zb-h2")
WAYS = ("barrier", "post-validation")  # the end of a step


def steps_of(world: Meeting, pipeline: Engine, steps: int, every: int = 0) -> Callable[[], float]:
    """Returns a side that runs so many steps."""
    microbatches = pipeline.schedule_maker.on(pipeline.store.layout.partition).microbatches
    batch = torch.zeros(microbatches, 1, 1, dtype=torch.int64)

    def run() -> float:
        limit = 0.0
        if every:
            # The norm of all ranks together is just over the limit, that of the first ranks is not.
            limit = 0.9 * run_step(pipeline, 0, batch, batch).norm
        world.barrier("the run to start")
        ends: list[float] = []
        taken_back = 0
        for step in range(steps):
            max_norm = limit if every and step % every == every // 2 else 0.0
            results = pipeline.train(StepBatch(batch, batch), StepSettings(step, 0.0, max_norm))
            taken_back += sum(result.rollback is not None for result in results)
            ends.append(time.perf_counter())
        taken_back += sum(result.rollback is not None for result in pipeline.drain())
        assert taken_back == (steps // every if every and pipeline.pending.validates else 0)
        return maxima(pipeline.store.world, ((ends[-1] - ends[0]) / (steps - 1),))[0]

    return run


class Op(NamedTuple):
    """The ops of every rank.

    `stash` is the share of a forward's activations that stays until W.
    """

    f: float
    b: float
    w: float
    stash: float


def sleeping_pipeline(
    world: Meeting, op: Op, schedule: str, microbatches: int, post_validation: bool
) -> tuple[Engine, float]:
    """Makes a pipeline of emulated layers, with the schedule for their sleeps.

    Returns:
        The pipeline, and the simulated seconds of a step.
    """
    ranks = world.size
    size = MESSAGE_BYTES // 4
    pipeline = Engine(
        world,
        make_layers([op.f] * ranks, [op.b] * ranks, [op.w] * ranks, size),
        uniform(ranks, ranks),
        EngineOptions(
            schedule, microbatches=microbatches, post_validation=post_validation, rollback="exact"
        ),
    )
    steps_of(world, pipeline, 3)()
    # Schedules are made for the ops' sleeps, and not for what else this machine was doing. The
    # memory is that of the paper's model.
    memory = {"activation_bytes": 1_000_000, "stash_bytes": round(1_000_000 * op.stash)}
    costs = tuple(replace(x, f=op.f, b=op.b, w=op.w, **memory) for x in pipeline.costs())
    Actions(pipeline).replan(costs)
    plan = pipeline.schedule_maker.plan(pipeline.store.layout.partition, costs)
    return pipeline, plan.step


def emulated(
    world: Meeting,
    times: list[float],
    stash: float,
    microbatches: int,
    steps: int,
    every: int,
    rounds: int,
) -> dict[str, Any]:
    """Runs on each rank."""
    f, b, w = times
    op = Op(f, b, w, stash)
    pipelines: dict[str, Engine] = {}
    predicted: dict[str, float] = {}
    for name in SCHEDULES:
        for way in WAYS:
            pipeline = sleeping_pipeline(world, op, name, microbatches, way == "post-validation")
            pipelines[f"{name} {way}"], predicted[f"{name} {way}"] = pipeline
    sides = {side: steps_of(world, pipeline, steps) for side, pipeline in pipelines.items()}
    best = pipelines["zb-auto post-validation"]
    long = every * math.ceil(steps / every)
    sides["rollback"] = steps_of(world, best, long, every)
    measured = medians(alternate(sides, rounds, warmup=0))
    figures = {name: compare(name, measured, predicted) for name in SCHEDULES}
    base = figures["zb-auto"]["post_validation_seconds"]
    rollback = (measured["rollback"] - base) * (long - 1) * every / long
    return {
        "ranks": world.size,
        "microbatches": microbatches,
        "op_seconds": {"f": op.f, "b": op.b, "w": op.w},
        "link_seconds": median(
            link.seconds(MESSAGE_BYTES) for link in best.schedule_maker.links.values()
        ),
        "steps_per_run": steps,
        "work_seconds": microbatches * (op.f + op.b + op.w),
        "schedules": figures,
        "rollback": {"every": every, "seconds_each": rollback, "of_a_step": rollback / base},
    }


def compare(
    schedule: str, measured: dict[str, float], predicted: dict[str, float]
) -> dict[str, float]:
    """Compares a barrier with post-validation, under one schedule."""
    barrier, without = (f"{schedule} {way}" for way in WAYS)
    return {
        "barrier_seconds": measured[barrier],
        "post_validation_seconds": measured[without],
        "predicted_makespan": predicted[barrier],
        "predicted_span": predicted[without],
        "barrier_over_makespan": measured[barrier] / predicted[barrier],
        "post_validation_over_span": measured[without] / predicted[without],
        "barrier_takes_longer": measured[barrier] / measured[without] - 1,
        "predicted_barrier_takes_longer": predicted[barrier] / predicted[without] - 1,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    row = next(row for row in table_5() if row["model"] == "28.3B")
    times = [row[key] / 1000 * options.scale / 100 for key in ("t_f_ms", "t_b_ms", "t_w_ms")]
    result = run_ranks(
        "benchmarks.post_validation:emulated",
        options.ranks,
        times=times,
        stash=row["w_memory_share"],
        microbatches=3 * options.ranks,
        steps=options.steps,
        every=options.every,
        rounds=options.rounds,
    )
    auto = result["schedules"]["zb-auto"]
    return {
        "post_validation_over_span": auto["post_validation_over_span"],
        "limit_over_span": 1.03,
        "barrier_takes_longer": auto["barrier_takes_longer"],
        "paper_barrier_takes_longer": 0.088,
        **result,
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("ranks", 8, "ranks"),
            ("steps", 8, "steps of a run"),
            ("rounds", 3, "runs of each side"),
            ("every", 5, "of the steps taken back, one in so many"),
            ("scale", 400, "length of an op, in percent of the paper's"),
        ],
    )
