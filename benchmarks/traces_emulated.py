"""The simulator against real ranks: a moment of a trace, even and balanced.

The processes' layers sleep as long as the trace says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from benchmarks.cost_traces import best, dense, in_halves, name_of, timeline, trace
from dynmo.balance.partition import uniform
from dynmo.balance.stage_costs import pipeline_costs
from dynmo.models.emulated import make_layers
from dynmo.pipeline.engine import Engine
from dynmo.runtime.comm.world import World

MOMENT = 18  # of 24
# Seconds that the shortest op of any stage sleeps. In a shorter sleep, waking up and the
# interpreter would count.
SHORTEST = 0.01


def emulate(
    world: World, cases: Sequence[tuple[str, int]], pairs: int, steps: int
) -> list[dict[str, Any]]:
    """Runs on each rank: one moment of each case's trace.

    Args:
        world: The ranks.
        cases: Name and tokens of a sequence, for each case.
        pairs: Number of turns of both placements.
        steps: Number of counted steps on a placement in each turn.
    """
    return [
        emulated(world, case, sequence, 48, MOMENT, pairs, steps, beside_dense=True)
        for case, sequence in cases
    ]


def emulated(
    world: World,
    case: str,
    sequence: int,
    blocks: int,
    moment: int,
    pairs: int,
    steps: int,
    shortest: float = SHORTEST,
    size: int = 1024,
    beside_dense: bool = False,
) -> dict[str, Any]:
    """Runs on each rank: the uniform placement and ours, in turn.

    The layers sleep in proportion to the trace.

    Args:
        world: The ranks.
        case: Name of the case.
        sequence: Tokens of a sequence.
        blocks: Depth of the model.
        moment: Moment of the trace.
        pairs: Number of turns of both placements.
        steps: Number of steps on a placement in each turn.
        shortest: Seconds that the shortest op of any stage sleeps.
        size: Floats of a message.
        beside_dense: Whether to also time the model without the technique, placed evenly.
    """
    ranks, microbatches = world.size, 2 * world.size
    layers = trace(case, blocks, sequence)[moment]
    frozen = next((i for i, x in enumerate(layers) if x.b or x.w), 0)
    full = dense(blocks, sequence)
    # A frozen layer no longer sleeps in B and W, because it is frozen.
    slept = tuple(
        replace(x, b=y.b, w=y.w) if i < frozen else x
        for i, (x, y) in enumerate(zip(layers, full, strict=True))
    )
    even = in_halves(uniform(blocks, ranks))
    target = best(layers, ranks, microbatches, even)
    stages = [
        stage for placement in (even, target) for stage in pipeline_costs(layers, placement).stages
    ]
    ops = [seconds for stage in stages for seconds in (stage.f, stage.b, stage.w) if seconds]
    unit = shortest / min(ops)  # seconds of a dense block's F
    model = make_layers(*([unit * getattr(x, key) for x in slept] for key in "fbw"), size=size)
    pipeline = Engine(world, model, even, schedule="zb-h1", microbatches=microbatches)
    pipeline.freeze(range(frozen))
    sides = {"uniform": (pipeline, even), "ours": (pipeline, target)}
    if beside_dense:
        whole = make_layers(*([unit * getattr(x, key) for x in full] for key in "fbw"), size=size)
        sides["dense"] = (
            Engine(world, whole, even, schedule="zb-h1", microbatches=microbatches),
            even,
        )
    data = torch.zeros(microbatches, 1, dtype=torch.int64)
    times: dict[str, list[float]] = {name: [] for name in sides}
    idle: dict[str, list[float]] = {name: [] for name in sides}
    counter = 0
    for _ in range(pairs):
        for name, (pipeline, placement) in sides.items():
            pipeline.move(placement)
            for turn in range(steps + 1):
                world.barrier("the step to start")
                start = time.perf_counter()
                result = pipeline.step(counter, data, data, lr=0.0)
                counter += 1
                if turn:  # the first step after a move opens channels
                    times[name].append(pipeline.largest(time.perf_counter() - start))
                    idle[name].append(result.idle_ratio)
    for pipeline, _ in sides.values():
        pipeline.on_workload_change(())  # closes its channels
    simulated = [timeline(layers, placement, microbatches) for placement in (even, target)]
    expected = [unit * step.makespan for step in simulated]
    uniform_seconds, our_seconds = (median(times[x]) for x in ("uniform", "ours"))
    without: dict[str, float] = {}
    if beside_dense:
        without["dense_seconds"], without["simulated_dense_seconds"] = (
            median(times["dense"]),
            unit * timeline(full, even, microbatches).makespan,
        )
        without["over_dense"] = without["dense_seconds"] / our_seconds
        without["simulated_over_dense"] = without["simulated_dense_seconds"] / expected[1]
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
        "share_of_simulated_gain": (uniform_seconds / our_seconds - 1)
        / (expected[0] / expected[1] - 1),
        "op_seconds": {"least": unit * min(ops), "median": unit * median(ops)},
        "idle_ratio": [median(idle[x]) for x in ("uniform", "ours")],
        "simulated_idle_ratio": [step.idle_ratio for step in simulated],
        "layers": [list(even.counts), list(target.counts)],
        **without,
    }


def emulated_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown, as the documents show it.

    Measured figures are beside simulated ones.
    """
    head = [
        "emulated",
        "ranks",
        "blocks",
        "even, s",
        "simulated",
        "balanced, s",
        "simulated",
        "gain",
        "simulated",
        "idle",
        "simulated",
    ]
    beside_dense = all("over_dense" in x for x in rows)
    head += ["over dense", "simulated"] * beside_dense
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for x in rows:
        times = zip((x["uniform_seconds"], x["our_seconds"]), x["simulated_seconds"], strict=True)
        idle = [
            " to ".join(f"{value:.0%}" for value in x[key])
            for key in ("idle_ratio", "simulated_idle_ratio")
        ]
        start = [name_of(x["case"], x["sequence"]), str(x["ranks"]), str(x["blocks"])]
        seconds = [f"{value:.2f}" for pair in times for value in pair]
        dense_too = [
            f"{x[key]:.2f}" for key in ("over_dense", "simulated_over_dense") if beside_dense
        ]
        lines.append(
            [*start, *seconds, f"{x['gain']:.2f}", f"{x['simulated_gain']:.2f}", *idle, *dense_too]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
