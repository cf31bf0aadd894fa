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
op, without an optimizer. The peers are torch's Schedule1F1B and ScheduleInterleavedZeroBubble, the
latter with one and with two stages a rank (torch_peer.py). The fastest of them in the same run
counts. torch's other schedules are measured beside them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import alternate, main, medians, run_ranks, start_together
from benchmarks.torch_peer import PEERS, TorchPeer, emulated_peer
from dynmo.balance.partition import exact, uniform
from dynmo.config import parse
from dynmo.cost.layer_cost import split_costs, uniform_costs
from dynmo.data.batches import Batches
from dynmo.data.corpus import open_corpus
from dynmo.models.emulated import make_layers
from dynmo.models.model import Model, next_token_loss
from dynmo.models.registry import load_model
from dynmo.pipeline.engine import Engine
from dynmo.runtime.comm.world import World
from dynmo.schedule.automatic.make import make
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import chunks_of, placement_of
from dynmo.schedule.simulator import simulate

MESSAGE_BYTES = 16384
NAMED_PEERS = ("torch 1f1b", "torch zero-bubble", "torch interleaved-zero-bubble")


def timed(world: World, pipeline: Engine, inputs: Tensor, targets: Tensor) -> Callable[[], float]:
    """Returns a side that times the forward and backward of one step of ours.

    Args:
        world: The ranks.
        pipeline: The engine.
        inputs: Inputs of a step, [microbatches, micro_batch, ...].
        targets: Targets of a step, of the same shape.

    Returns:
        A function that runs a step and returns the seconds of the slowest rank.
    """

    def step() -> float:
        start = start_together()
        pipeline.forward_backward(0, inputs, targets)
        seconds = torch.zeros(world.size, dtype=torch.float64)
        seconds[world.rank] = time.perf_counter() - start
        world.sum(seconds, "the step to end")
        pipeline.discard()
        return float(seconds.max())

    return step


STEPS = 4  # of a run of ZB-2p. The first step fills the pipeline.


def without_barrier(
    world: World, pipeline: Engine, batch: Tensor, busy: list[float]
) -> Callable[[], float]:
    """Returns a side whose steps begin before the step before is final.

    Args:
        world: The ranks.
        pipeline: The engine.
        batch: Inputs and targets of each step.
        busy: Takes the busiest rank's seconds in ops, of each step.

    Returns:
        A function that runs `STEPS` steps and returns the seconds per step of the slowest rank.
    """

    def run() -> float:
        world.barrier("the run to start")
        ends: list[float] = []
        for step in range(STEPS):
            results = pipeline.advance(step, batch, batch, lr=0.0)
            busy.extend(max(result.busy) for result in results)
            ends.append(time.perf_counter())
        busy.extend(max(result.busy) for result in pipeline.drain())
        return pipeline.largest((ends[-1] - ends[0]) / (STEPS - 1))

    return run


def emulated(world: World, microbatches: int, milliseconds: int, rounds: int) -> dict[str, Any]:
    """Runs on each rank, with one emulated layer a stage.

    A rank's op takes as long whether the rank has one stage or two.

    Args:
        world: The ranks.
        microbatches: Microbatches of a step.
        milliseconds: Time of an op.
        rounds: Number of counted turns.
    """
    seconds = milliseconds / 1000
    schedules = ("1f1b", "zb-h1", "zb-h2", "zb-v")
    batch = torch.zeros(microbatches, 1, 1, dtype=torch.int64)
    sides: dict[str, Callable[[], float]] = {}
    pipelines: dict[str, Engine] = {}
    for name in schedules:
        stages = world.size * chunks_of(name)
        times = [seconds / chunks_of(name)] * stages
        model = make_layers(times, times, times, MESSAGE_BYTES // 4)
        pipelines[name] = Engine(
            world, model, uniform(stages, stages), schedule=name, microbatches=microbatches
        )
        sides[f"dynmo {name}"] = timed(world, pipelines[name], batch, batch)
    model = make_layers(
        [seconds] * world.size, [seconds] * world.size, [seconds] * world.size, MESSAGE_BYTES // 4
    )
    second = Engine(
        world,
        model,
        uniform(world.size, world.size),
        schedule="zb-auto",
        microbatches=microbatches,
        post_validation=True,
    )
    busy: list[float] = []
    without_barrier(world, second, batch, busy)()
    # The schedule is made for the ops' sleeps, and for activations of which half stay until W.
    even = {
        "f": seconds,
        "b": seconds,
        "w": seconds,
        "activation_bytes": 1_000_000,
        "stash_bytes": 500_000,
    }
    layers = tuple(replace(layer, **even) for layer in second.costs())
    second.actions.replan(layers)
    busy.clear()
    sides["dynmo zb-2p"] = without_barrier(world, second, batch, busy)
    for name in PEERS:
        peer = emulated_peer(name, microbatches, seconds, seconds, seconds, MESSAGE_BYTES)
        sides[f"torch {name}"] = peer.step
    measured = medians(alternate(sides, rounds, warmup=1))
    link = median(
        link.seconds(MESSAGE_BYTES) for link in pipelines["zb-h1"].schedule_keeper.links.values()
    )
    predicted: dict[str, float] = {}
    for name in schedules:
        placement = placement_of(name, world.size)
        costs = split_costs(uniform_costs(world.size, seconds, seconds, seconds, link), placement)
        schedule = make(name, world.size, microbatches, costs=costs, objective=Objective.MAKESPAN)
        predicted[name] = simulate(schedule, costs).makespan
    predicted["zb-2p"] = second.predict(layers, second.partition).span
    best = min(NAMED_PEERS, key=measured.__getitem__)
    others = min((name for name in measured if name.startswith("torch ")), key=measured.__getitem__)
    own = min((f"dynmo {name}" for name in schedules), key=measured.__getitem__)
    return {
        "ranks": world.size,
        "microbatches": microbatches,
        "op_seconds": seconds,
        "link_seconds": link,
        "work_seconds": 3 * seconds * microbatches,
        "measured": measured,
        "predicted": predicted,
        "measured_over_predicted": measured["dynmo zb-h1"] / predicted["zb-h1"],
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
            "speedup_limit": measured[best] / (3 * seconds * microbatches),
        },
        "best_of_all_torch": others,
        "speedup_over_all_torch": measured[others] / min(measured[own], measured["dynmo zb-2p"]),
    }


def gpt(
    microbatches: int, blocks: int, hidden: int, sequence: int, micro_batch: int
) -> tuple[Model, Tensor, Tensor]:
    """Makes a GPT and the batch of one step.

    Args:
        microbatches: Microbatches of a step.
        blocks: Depth of the model.
        hidden: Width of the model.
        sequence: Tokens of a sequence.
        micro_batch: Sequences of a microbatch.

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
    model = load_model(config)
    inputs, targets = Batches(open_corpus("stdlib"), sequence, batch, micro_batch, 0).train(0)
    return model, inputs, targets


def real(world: World, microbatches: int, rounds: int, hidden: int) -> dict[str, Any]:
    """Runs on each rank: the same GPT layers, cut the same way, under each schedule.

    The schedules are ours and torch's.

    Args:
        world: The ranks.
        microbatches: Microbatches of a step.
        rounds: Number of counted turns.
        hidden: Width of the model.
    """
    model, inputs, targets = gpt(microbatches, blocks=6, hidden=hidden, sequence=128, micro_batch=2)
    stages = {
        name: world.size * chunks_of(name) for name in ("1f1b", "zb-h1", "zb-h2", "zb-auto", "zb-v")
    }
    pipelines = {
        name: Engine(
            world, model, uniform(model.layers, count), schedule=name, microbatches=microbatches
        )
        for name, count in stages.items()
    }
    # All sides have the same cut, by measured time.
    first = pipelines["zb-h1"]
    for _ in range(3):
        timed(world, first, inputs, targets)()
    layers = first.costs()
    weights = [cost.seconds for cost in layers]
    cuts = {name: exact(weights, count) for name, count in stages.items()}
    sides: dict[str, Callable[[], float]] = {}
    for name, pipeline in pipelines.items():
        pipeline.move(cuts[name])
        pipeline.actions.replan(layers)
        sides[f"dynmo {name}"] = timed(world, pipeline, inputs, targets)
    flat_inputs, flat_targets = inputs.flatten(0, 1), targets.flatten(0, 1)

    def build(stage: int, stages: int) -> nn.Module:
        counts = exact(weights, stages)
        own = counts.range_of(stage)
        return nn.Sequential(
            *(layer for index, layer in enumerate(model.build(own)) if index in own)
        )

    for name in PEERS:
        sides[f"torch {name}"] = TorchPeer(
            name, microbatches, build, flat_inputs, flat_targets, next_token_loss
        ).step
    measured = medians(alternate(sides, rounds, warmup=2))
    best = min(NAMED_PEERS, key=measured.__getitem__)
    others = min((name for name in measured if name.startswith("torch ")), key=measured.__getitem__)
    own = min((name for name in measured if name.startswith("dynmo ")), key=measured.__getitem__)
    costs = first.costs()
    return {
        "microbatches": microbatches,
        "hidden": hidden,
        "layers_per_rank": list(cuts["zb-h1"].counts),
        "measured": measured,
        "predicted": {
            name: pipeline.predict(costs, cuts[name]).makespan
            for name, pipeline in pipelines.items()
        },
        "best_peer": best,
        "best_own": own,
        "speedup": measured[best] / measured[own],
        "best_of_all_torch": others,
        "speedup_over_all_torch": measured[others] / measured[own],
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
        "measured_over_predicted": sleeping["measured_over_predicted"],
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
