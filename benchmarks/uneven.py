"""Uneven stages: steps against the simulator, and the plan's gain.

Emulated: 8 ranks, 16 microbatches, 32 layers that sleep 7.5 ms on average for each of F, B and W. A
stage's op is thus 30 ms. The last layers take three times as long as the first, as in a model whose
front was pruned. Each takes up to 30 % more or less than that.

Every schedule first runs on the uniform placement. Its step is held against what the simulator says
for the layer costs and links measured in the same run. Then the plan is made from those costs: the
better of zb-auto and ZB-V, each with its own placement. It is compared with uniform and
ZB-H1. torch's schedules run the same uneven uniform stages beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.executor import timed
from benchmarks.harness import alternate, medians, run_ranks
from benchmarks.output import main
from benchmarks.torch_peer import PEERS, EmulatedStage, TorchPeer
from dynmo.models.emulated import make_layers
from dynmo.pipeline.actions import Actions
from dynmo.plan.balancers import balancer
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.catalogue import SCHEDULES, chunks_of

LAYERS = 32
MESSAGE_BYTES = 16384


def layer_seconds(milliseconds: int) -> list[list[float]]:
    """Returns F, B and W of every layer, in seconds.

    The mean of a stage's op of four layers is `milliseconds`.
    """
    generator = torch.Generator().manual_seed(3)
    mean = milliseconds / 1000 / 4
    spread = (
        torch.rand(3, LAYERS, generator=generator, dtype=torch.float64) * 0.6 + 0.7
    ) * torch.linspace(0.5, 1.5, LAYERS)
    return (spread / spread.mean(dim=1, keepdim=True) * mean).tolist()


def uneven(world: Meeting, milliseconds: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """Runs on each rank: every schedule on uneven stages, and the plan."""
    f, b, w = layer_seconds(milliseconds)
    model = make_layers(f, b, w, MESSAGE_BYTES // 4)
    batch = torch.zeros(microbatches, 1, 1, dtype=torch.int64)
    pipelines: dict[str, Engine] = {}
    sides: dict[str, Callable[[], float]] = {}
    for name in SCHEDULES:
        placement = uniform(LAYERS, world.size * chunks_of(name))
        pipelines[name] = Engine(
            world, model, placement, EngineOptions(name, microbatches=microbatches)
        )
        sides[name] = timed(world, pipelines[name], batch, batch)
        sides[name]()
        Actions(pipelines[name]).replan(pipelines[name].costs())
    start = time.perf_counter()
    chosen, target = choose(pipelines)
    planning = time.perf_counter() - start
    plan = Engine(world, model, target, EngineOptions(chosen, microbatches=microbatches))
    sides["plan"] = timed(world, plan, batch, batch)
    sides["plan"]()
    Actions(plan).replan(plan.costs())
    pipelines["plan"] = plan

    def build(stage: int, stages: int) -> nn.Module:
        own = uniform(LAYERS, stages).range_of(stage)
        return nn.Sequential(*(EmulatedStage(f[i], b[i], w[i]) for i in own))

    flat = torch.zeros(microbatches, MESSAGE_BYTES // 4)
    for name in PEERS:
        sides[f"torch {name}"] = TorchPeer(
            name, microbatches, build, flat, flat, lambda out, _: out.mean()
        ).step
    measured = medians(alternate(sides, rounds, warmup=1))
    predicted = {
        name: pipeline.schedule_maker.plan(
            pipeline.store.layout.partition, pipeline.costs()
        ).timeline.makespan
        for name, pipeline in pipelines.items()
    }
    promised = predicted["zb-h1"] / predicted["plan"]
    gained = measured["zb-h1"] / measured["plan"]
    best = min((name for name in measured if name.startswith("torch ")), key=measured.__getitem__)
    return {
        "measured": measured,
        "predicted": predicted,
        "measured_over_predicted": {name: measured[name] / predicted[name] for name in predicted},
        "plan": [chosen, *target.counts],
        "planning_seconds": planning,
        "plan_gain_predicted": promised,
        "plan_gain_measured": gained,
        "plan_gain_measured_over_predicted": gained / promised,
        "best_peer": best,
        "plan_over_best_peer": measured[best] / measured["plan"],
    }


def choose(pipelines: dict[str, Engine]) -> tuple[str, Partition]:
    """Returns the schedule and the placement of the plan.

    It is the better of zb-auto and ZB-V, each with its own placement. Both schedules are made from
    costs and keep no more than 1F1B does.
    """
    layers, targets = pipelines["zb-h1"].costs(), dict[str, Partition]()
    for name in ("zb-auto", "zb-v"):
        pipeline = pipelines[name]
        now = pipeline.schedule_maker.plan(pipeline.store.layout.partition, layers)
        targets[name] = balancer("exact")(now.problem, now)
    chosen = min(
        targets,
        key=lambda name: (
            pipelines[name].schedule_maker.plan(targets[name], layers).timeline.makespan
        ),
    )
    return chosen, targets[chosen]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    figures = run_ranks(
        "benchmarks.uneven:uneven",
        8,
        milliseconds=options.milliseconds,
        microbatches=options.microbatches,
        rounds=options.rounds,
    )
    worst = max(figures["measured_over_predicted"].values(), key=lambda ratio: abs(ratio - 1))
    return {"worst_measured_over_predicted": worst} | figures


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("rounds", 3, "rounds"),
            ("milliseconds", 30, "mean length of a stage's op"),
            ("microbatches", 16, "microbatches, a multiple of 8 for interleaving"),
        ],
    )
