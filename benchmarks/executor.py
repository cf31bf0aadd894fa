"""The executor against its own simulator and torch.distributed.pipelining.

All are measured in one run.

Emulated: 8 ranks, 32 microbatches, ops that sleep 10 ms. The rest of a step is scheduling and
messages. The limit is what the simulator predicts from the ops' times and the measured links.

Real: 2 ranks of one thread, a GPT of 6 blocks and hidden size `--hidden`, 4 and 8 microbatches of
2 x 128 tokens. Splitting a linear's backward costs some Python, which torch's fused 1F1B does not
run. The smaller the model, the more it shows (`--hidden 256`).

ZB-2p (zb-auto in twice 1F1B's memory, no barrier: post-validation) is timed per step, over several
steps without their first. Its limit is the busiest rank's own time in ops, as measured: a schedule
without any bubble.

The others, ours and torch's, are timed from a start together to the end of the slowest rank's last
op, without an optimizer. The peer is the fastest of torch's schedules in the same run. These are
1F1B and zero bubble with one and with two stages a rank, and ZBV (torch_peer.py). `best_peer` names
it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import alternate, medians, run_ranks, start_together
from benchmarks.output import main
from benchmarks.torch_peer import PEERS, TorchPeer, emulated_peer
from dynmo.config import parse
from dynmo.cost.layer_cost import LayerCost, split_costs, uniform_costs
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.models.emulated import make_layers
from dynmo.models.loss import next_token_loss
from dynmo.models.model import Model
from dynmo.pipeline.actions import Actions
from dynmo.plan.bisection import exact
from dynmo.plan.partition import uniform
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.batch_check import StepBatch, StepSettings
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import chunks_of, make, stage_ranks_of
from dynmo.schedule.simulator import simulate
from dynmo.train.setup import model_of

MESSAGE_BYTES = 16384


def timed(world: Meeting, pipeline: Engine, inputs: Tensor, targets: Tensor) -> Callable[[], float]:
    """Returns a side that times the forward and backward of one step of ours."""

    def step() -> float:
        start = start_together()
        pipeline.programs.train(StepBatch(inputs, targets), 0, 1.0)
        seconds = torch.zeros(world.size, dtype=torch.float64)
        seconds[world.rank] = time.perf_counter() - start
        world.sum(seconds, "the step to end")
        pipeline.optimizer_step.discard()
        return float(seconds.max())

    return step


STEPS = 4  # of a run of ZB-2p. The first step fills the pipeline.


def without_barrier(
    world: Meeting, pipeline: Engine, batch: Tensor, busy: list[float]
) -> Callable[[], float]:
    """Returns a side whose steps begin before the step before is final."""

    def run() -> float:
        world.barrier("the run to start")
        ends: list[float] = []
        for step in range(STEPS):
            results = pipeline.train(StepBatch(batch, batch), StepSettings(step, 0.0))
            busy.extend(max(result.busy) for result in results)
            ends.append(time.perf_counter())
        busy.extend(max(result.busy) for result in pipeline.drain())
        return maxima(pipeline.store.world, ((ends[-1] - ends[0]) / (STEPS - 1),))[0]

    return run


def emulated(world: Meeting, microbatches: int, milliseconds: int, rounds: int) -> dict[str, Any]:
    """Runs on each rank, with one emulated layer a stage.

    A rank's op takes as long whether the rank has one stage or two.
    """
    seconds = milliseconds / 1000
    batch = torch.zeros(microbatches, 1, 1, dtype=torch.int64)
    pipelines = {
        name: sleeping_pipeline(world, seconds, EngineOptions(name, microbatches=microbatches))
        for name in ("1f1b", "zb-h1", "zb-h2", "zb-v")
    }
    sides = {
        f"dynmo {name}": timed(world, pipeline, batch, batch)
        for name, pipeline in pipelines.items()
    }
    busy: list[float] = []
    zb_2p, layers = zb_2p_pipeline(world, seconds, microbatches)
    sides["dynmo zb-2p"] = without_barrier(world, zb_2p, batch, busy)
    for name in PEERS:
        peer = emulated_peer(name, microbatches, seconds, seconds, seconds, MESSAGE_BYTES)
        sides[f"torch {name}"] = peer.step
    measured = medians(alternate(sides, rounds, warmup=1))
    link = median(
        link.seconds(MESSAGE_BYTES) for link in pipelines["zb-h1"].schedule_maker.links.values()
    )
    predicted = {
        name: makespan(name, world.size, microbatches, seconds, link) for name in pipelines
    }
    plan = zb_2p.schedule_maker.plan(zb_2p.store.layout.partition, layers)
    predicted["zb-2p"] = plan.timeline.span
    best, own = fastest(measured, [f"dynmo {name}" for name in pipelines])
    work = 3 * seconds * microbatches
    return {
        "ranks": world.size,
        "microbatches": microbatches,
        "op_seconds": seconds,
        "link_seconds": link,
        "work_seconds": work,
        "measured": measured,
        "predicted": predicted,
        "measured_over_predicted": {
            name: measured[f"dynmo {name}"] / seconds for name, seconds in predicted.items()
        },
        "best_peer": best,
        "speedup_over_best_peer": measured[best] / measured["dynmo zb-h1"],
        # No executor without any overhead, running ZB-H1, could do better against this peer.
        "speedup_limit": measured[best] / predicted["zb-h1"],
        "best_own": own,
        "speedup_of_best_own": measured[best] / measured[own],
        "zb_2p": {
            "seconds": measured["dynmo zb-2p"],
            "busiest_rank_seconds": median(busy),
            "over_busiest_rank": measured["dynmo zb-2p"] / median(busy),
            "over_predicted_span": measured["dynmo zb-2p"] / predicted["zb-2p"],
            "speedup_over_best_peer": measured[best] / measured["dynmo zb-2p"],
            # The limit has no bubble and no overhead.
            "speedup_limit": measured[best] / work,
        },
    }


def sleeping_pipeline(world: Meeting, seconds: float, options: EngineOptions) -> Engine:
    """Makes a pipeline of emulated layers, one on each stage."""
    chunks = chunks_of(options.schedule)
    stages = world.size * chunks
    times = [seconds / chunks] * stages
    model = make_layers(times, times, times, MESSAGE_BYTES // 4)
    return Engine(world, model, uniform(stages, stages), options)


def zb_2p_pipeline(
    world: Meeting, seconds: float, microbatches: int
) -> tuple[Engine, tuple[LayerCost, ...]]:
    """Makes the pipeline of ZB-2p, and the costs that its schedule is made for.

    The costs are the ops' sleeps, and activations of which half stay until W.
    """
    options = EngineOptions("zb-auto", microbatches, post_validation=True)
    pipeline = sleeping_pipeline(world, seconds, options)
    batch = torch.zeros(microbatches, 1, 1, dtype=torch.int64)
    without_barrier(world, pipeline, batch, [])()
    memory = {"activation_bytes": 1_000_000, "stash_bytes": 500_000}
    layers = tuple(
        replace(layer, f=seconds, b=seconds, w=seconds, **memory) for layer in pipeline.costs()
    )
    Actions(pipeline).replan(layers)
    return pipeline, layers


def makespan(name: str, ranks: int, microbatches: int, seconds: float, link: float) -> float:
    """Returns the simulated seconds of a step of ranks that are alike."""
    placement = stage_ranks_of(name, ranks)
    costs = split_costs(uniform_costs(ranks, seconds, seconds, seconds, link), placement)
    schedule = make(name, ranks, microbatches, costs=costs, objective=Objective.MAKESPAN)
    return simulate(schedule, costs).makespan


def fastest(measured: dict[str, float], own: Iterable[str]) -> tuple[str, str]:
    """Returns the fastest of all of torch's schedules, and of ours."""
    peers = [name for name in measured if name.startswith("torch ")]
    return min(peers, key=measured.__getitem__), min(own, key=measured.__getitem__)


def gpt(
    microbatches: int, blocks: int, hidden: int, sequence: int, micro_batch: int
) -> tuple[Model, Tensor, Tensor]:
    """Makes a GPT and the batch of one step.

    Returns:
        The model, the inputs and the targets, both [microbatches, micro_batch, sequence].
    """
    batch = micro_batch * microbatches
    config = parse(
        {
            "model": {
                "blocks": blocks,
                "hidden": hidden,
                "heads": hidden // 64,
                "sequence": sequence,
            },
            "train": {"global_batch": batch, "micro_batch": micro_batch},
        }
    )
    model = model_of(config)
    inputs, targets = Batches(open_corpus("stdlib"), sequence, batch, micro_batch, 0).train(0)
    return model, inputs, targets


def real(world: Meeting, microbatches: int, rounds: int, hidden: int) -> dict[str, Any]:
    """Runs on each rank: the same GPT layers, cut the same way, under each schedule.

    The schedules are ours and torch's.
    """
    model, inputs, targets = gpt(microbatches, blocks=6, hidden=hidden, sequence=128, micro_batch=2)
    pipelines, weights, predicted = own_pipelines(world, model, inputs, targets)
    sides = {
        f"dynmo {name}": timed(world, pipeline, inputs, targets)
        for name, pipeline in pipelines.items()
    }
    sides |= torch_sides(model, weights, inputs, targets)
    measured = medians(alternate(sides, rounds, warmup=2))
    best, own = fastest(measured, [f"dynmo {name}" for name in pipelines])
    simulated = predicted()
    return {
        "microbatches": microbatches,
        "hidden": hidden,
        "layers_per_rank": list(exact(weights, world.size).counts),
        "measured": measured,
        "predicted": simulated,
        "best_peer": best,
        "best_own": own,
        "speedup": measured[best] / measured[own],
        # No executor without overhead could do better with these schedules.
        "speedup_limit": measured[best] / min(simulated.values()),
    }


def own_pipelines(
    world: Meeting, model: Model, inputs: Tensor, targets: Tensor
) -> tuple[dict[str, Engine], list[float], Callable[[], dict[str, float]]]:
    """Makes a pipeline for each of our schedules. All have the same cut, by measured time.

    Returns:
        The pipelines, the seconds of each layer, and a function that simulates each schedule with
        costs of the moment.
    """
    stages = {
        name: world.size * chunks_of(name) for name in ("1f1b", "zb-h1", "zb-h2", "zb-auto", "zb-v")
    }
    pipelines = {
        name: Engine(
            world,
            model,
            uniform(model.layers, count),
            EngineOptions(name, microbatches=len(inputs)),
        )
        for name, count in stages.items()
    }
    first = pipelines["zb-h1"]
    for _ in range(3):
        timed(world, first, inputs, targets)()
    layers = first.costs()
    weights = [cost.seconds for cost in layers]
    cuts = {name: exact(weights, count) for name, count in stages.items()}
    for name, pipeline in pipelines.items():
        Actions(pipeline).move(cuts[name])
        Actions(pipeline).replan(layers)

    def predicted() -> dict[str, float]:
        costs = first.costs()
        return {
            name: pipeline.schedule_maker.plan(cuts[name], costs).timeline.makespan
            for name, pipeline in pipelines.items()
        }

    return pipelines, weights, predicted


def torch_sides(
    model: Model, weights: list[float], inputs: Tensor, targets: Tensor
) -> dict[str, Callable[[], float]]:
    """Returns torch's schedules, each with the stages of the exact partition."""

    def build(stage: int, stages: int) -> nn.Module:
        own = exact(weights, stages).range_of(stage)
        return nn.Sequential(
            *(layer for index, layer in enumerate(model.build(own)) if index in own)
        )

    flat = inputs.flatten(0, 1), targets.flatten(0, 1)
    return {
        f"torch {name}": TorchPeer(name, len(inputs), build, *flat, next_token_loss).step
        for name in PEERS
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sleeping = run_ranks(
        "benchmarks.executor:emulated",
        8,
        microbatches=32,
        milliseconds=options.milliseconds,
        rounds=options.rounds,
    )
    computing = {
        str(m): run_ranks(
            "benchmarks.executor:real",
            2,
            microbatches=m,
            rounds=options.real_rounds,
            hidden=options.hidden,
        )
        for m in (4, 8)
    }
    return {
        "speedup_over_best_peer": sleeping["speedup_over_best_peer"],
        "speedup_limit": sleeping["speedup_limit"],
        "speedup_of_best_own": sleeping["speedup_of_best_own"],
        "zb_2p_over_busiest_rank": sleeping["zb_2p"]["over_busiest_rank"],
        "zb_2p_speedup_over_best_peer": sleeping["zb_2p"]["speedup_over_best_peer"],
        "speedup_over_best_peer_real": min(case["speedup"] for case in computing.values()),
        "emulated": sleeping,
        "real": computing,
    }


if __name__ == "__main__":
    main(
        __doc__ or "",
        measure,
        [
            ("rounds", 5, "emulated rounds"),
            ("real_rounds", 9, "real rounds"),
            ("milliseconds", 10, "length of an emulated op"),
            ("hidden", 512, "hidden size of the real GPT, a multiple of 64"),
        ],
    )
