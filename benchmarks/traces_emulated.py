"""The simulator against real ranks: a moment of a cost trace on processes whose layers sleep as long, evenly placed and balanced."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.cost_traces import best, dense, in_halves, name_of, timeline, trace
from dynmo.api import Pipeline
from dynmo.balance.partition import Partition, uniform
from dynmo.balance.placed import pipeline_costs
from dynmo.models.emulated import make_layers
from dynmo.runtime.world import World

MOMENT = 18  # of 24
SHORTEST = 0.01  # seconds that the shortest op of any stage sleeps: under that, waking up and the interpreter would count


def emulate(world: World, cases: Sequence[tuple[str, int]], pairs: int, steps: int) -> list[dict[str, Any]]:
    """Runs on each rank."""
    return [emulated(world, case, sequence, 48, MOMENT, pairs, steps) for case, sequence in cases]


def emulated(
    world: World, case: str, sequence: int, blocks: int, moment: int, pairs: int, steps: int, shortest: float = SHORTEST, size: int = 1024
) -> dict[str, Any]:
    """Runs on each rank: the uniform placement and ours in turn, on layers that sleep in proportion to the trace. size: floats of a
    message."""
    ranks, microbatches = world.size, 2 * world.size
    layers = trace(case, blocks, sequence)[moment]
    frozen = next((i for i, x in enumerate(layers) if x.b or x.w), 0)
    full = dense(blocks, sequence)
    # A frozen layer sleeps in B and W no more, because it is frozen.
    slept = tuple(replace(x, b=y.b, w=y.w) if i < frozen else x for i, (x, y) in enumerate(zip(layers, full, strict=True)))
    even = in_halves(uniform(blocks, ranks))
    target = best(layers, ranks, microbatches, even)
    stages = [stage for placement in (even, target) for stage in pipeline_costs(layers, placement).stages]
    ops = [seconds for stage in stages for seconds in (stage.f, stage.b, stage.w) if seconds]
    unit = shortest / min(ops)  # seconds of a dense block's F
    model = make_layers(*([unit * getattr(x, key) for x in slept] for key in "fbw"), size=size)
    pipeline = Pipeline(world, model, even, schedule="zb-h1", microbatches=microbatches)
    pipeline.freeze(range(frozen))
    data = torch.zeros(microbatches, 1, dtype=torch.int64)
    times: dict[Partition, list[float]] = {even: [], target: []}
    idle: dict[Partition, list[float]] = {even: [], target: []}
    counter = 0
    for _ in range(pairs):
        for placement, taken in times.items():
            pipeline.move(placement)
            for turn in range(steps + 1):
                world.barrier("the step to start")
                start = time.perf_counter()
                result = pipeline.step(counter, data, data, lr=0.0)
                counter += 1
                if turn:  # the first step after a move opens channels
                    taken.append(pipeline.largest(time.perf_counter() - start))
                    idle[placement].append(result.idle_ratio)
    pipeline.changed(())  # closes its channels
    simulated = [timeline(layers, placement, microbatches) for placement in (even, target)]
    expected = [unit * found.makespan for found in simulated]
    uniform_seconds, our_seconds = (median(times[x]) for x in (even, target))
    return {
        "case": case,
        "sequence": sequence,
        "blocks": blocks,
        "ranks": ranks,
        "microbatches": microbatches,
        "moment": moment,
        "frozen_layers": frozen,
        "uniform_seconds": uniform_seconds,
        "our_seconds": our_seconds,
        "gain": uniform_seconds / our_seconds,
        "simulated_seconds": expected,
        "simulated_gain": expected[0] / expected[1],
        "share_of_simulated_gain": (uniform_seconds / our_seconds - 1) / (expected[0] / expected[1] - 1),
        "op_seconds": {"least": unit * min(ops), "median": unit * median(ops)},
        "idle_ratio": [median(idle[x]) for x in (even, target)],
        "simulated_idle_ratio": [found.idle_ratio for found in simulated],
        "layers": [list(even.counts), list(target.counts)],
    }


def emulated_table(rows: Sequence[dict[str, Any]]) -> str:
    """In Markdown, as the documents show it: measured beside simulated."""
    head = ["emulated", "ranks", "blocks", "even, s", "simulated", "balanced, s", "simulated", "gain", "simulated", "idle", "simulated"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for x in rows:
        times = zip((x["uniform_seconds"], x["our_seconds"]), x["simulated_seconds"], strict=True)
        idle = [" to ".join(f"{value:.0%}" for value in x[key]) for key in ("idle_ratio", "simulated_idle_ratio")]
        start = [name_of(x["case"], x["sequence"]), str(x["ranks"]), str(x["blocks"])]
        seconds = [f"{value:.2f}" for pair in times for value in pair]
        lines.append([*start, *seconds, f"{x['gain']:.2f}", f"{x['simulated_gain']:.2f}", *idle])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
