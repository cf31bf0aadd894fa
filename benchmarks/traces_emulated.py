"""The simulator against real ranks: a moment of a trace, even and balanced.

The processes' layers sleep as long as the trace says.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch

from benchmarks.cost_traces import Layers, best, dense, in_halves, name_of, timeline, trace
from benchmarks.harness import medians, run_step
from benchmarks.output import markdown
from dynmo.models.emulated import make_layers
from dynmo.pipeline.actions import Actions
from dynmo.plan.costs import pipeline_costs
from dynmo.plan.partition import Partition, uniform
from dynmo.runtime.comm.agreement import maxima
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.engine.engine import Engine
from dynmo.runtime.options import EngineOptions

MOMENT = 18  # of 24


class Emulation(NamedTuple):
    """A moment of a trace, and how it is run.

    Attributes:
        case: Name of the case.
        sequence: Tokens of a sequence.
        blocks: Depth of the model.
        moment: Moment of the trace.
        pairs: Number of turns of both placements.
        steps: Number of counted steps on a placement in each turn.
        shortest: Seconds that the shortest op of any stage sleeps. In a shorter sleep, waking up
            and the interpreter would count.
        size: Floats of a message.
        with_dense: Whether to also time the model without the technique, placed evenly.
    """

    case: str
    sequence: int
    blocks: int
    moment: int
    pairs: int
    steps: int
    shortest: float = 0.01
    size: int = 1024
    with_dense: bool = False


def emulate(
    world: Meeting, cases: Sequence[tuple[str, int]], pairs: int, steps: int
) -> list[dict[str, Any]]:
    """Runs on each rank: one moment of each case's trace."""
    return [
        measure(world, Emulation(case, sequence, 48, MOMENT, pairs, steps, with_dense=True))
        for case, sequence in cases
    ]


def emulated(world: Meeting, **given: Any) -> dict[str, Any]:
    """Runs `measure` on each rank."""
    return measure(world, Emulation(**given))


def measure(world: Meeting, given: Emulation) -> dict[str, Any]:
    """Runs on each rank: the uniform placement and ours, in turn.

    The layers sleep in proportion to the trace.
    """
    ranks, microbatches = world.size, 2 * world.size
    layers = trace(given.case, given.blocks, given.sequence)[given.moment]
    frozen = next((i for i, x in enumerate(layers) if x.b or x.w), 0)
    full = dense(given.blocks, given.sequence)
    even = in_halves(uniform(given.blocks, ranks))
    target = best(layers, ranks, microbatches, even)
    stages = [
        stage for placement in (even, target) for stage in pipeline_costs(layers, placement).stages
    ]
    ops = [seconds for stage in stages for seconds in (stage.f, stage.b, stage.w) if seconds]
    unit = given.shortest / min(ops)  # seconds of a dense block's F
    # A frozen layer no longer sleeps in B and W, because it is frozen.
    slept = tuple(
        replace(x, b=y.b, w=y.w) if i < frozen else x
        for i, (x, y) in enumerate(zip(layers, full, strict=True))
    )
    pipeline = sleeping_pipeline(world, slept, unit, given.size, even)
    Actions(pipeline).freeze(range(frozen))
    sides = {"uniform": (pipeline, even), "ours": (pipeline, target)}
    if given.with_dense:
        sides["dense"] = (sleeping_pipeline(world, full, unit, given.size, even), even)
    times, idle = in_turn(world, sides, given.pairs, given.steps)
    simulated = [timeline(layers, placement, microbatches) for placement in (even, target)]
    expected = [unit * step.makespan for step in simulated]
    gain, simulated_gain = times["uniform"] / times["ours"], expected[0] / expected[1]
    without: dict[str, float] = {}
    if given.with_dense:
        simulated_dense = unit * timeline(full, even, microbatches).makespan
        without = {
            "dense_seconds": times["dense"],
            "simulated_dense_seconds": simulated_dense,
            "over_dense": times["dense"] / times["ours"],
            "simulated_over_dense": simulated_dense / expected[1],
        }
    return {
        "case": given.case,
        "sequence": given.sequence,
        "blocks": given.blocks,
        "ranks": ranks,
        "microbatches": microbatches,
        "moment": given.moment,
        "frozen_layers": frozen,
        "uniform_seconds": times["uniform"],
        "our_seconds": times["ours"],
        "gain": gain,
        "simulated_seconds": expected,
        "simulated_gain": simulated_gain,
        "share_of_simulated_gain": (gain - 1) / (simulated_gain - 1),
        "op_seconds": {"least": unit * min(ops), "median": unit * median(ops)},
        "idle_ratio": [idle[name] for name in ("uniform", "ours")],
        "simulated_idle_ratio": [step.idle_ratio for step in simulated],
        "layers": [list(even.counts), list(target.counts)],
        **without,
    }


def sleeping_pipeline(
    world: Meeting, layers: Layers, unit: float, size: int, placement: Partition
) -> Engine:
    """Makes a pipeline of layers that sleep."""
    model = make_layers(*([unit * getattr(x, key) for x in layers] for key in "fbw"), size=size)
    return Engine(world, model, placement, EngineOptions("zb-h1", microbatches=2 * world.size))


def in_turn(
    world: Meeting, sides: dict[str, tuple[Engine, Partition]], pairs: int, steps: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Runs all sides in turn.

    Returns:
        The median seconds and the median idle ratio of a step, by side.
    """
    data = torch.zeros(2 * world.size, 1, dtype=torch.int64)
    times: dict[str, list[float]] = {name: [] for name in sides}
    idle: dict[str, list[float]] = {name: [] for name in sides}
    counter = 0
    for _ in range(pairs):
        for name, (pipeline, placement) in sides.items():
            Actions(pipeline).move(placement)
            for turn in range(steps + 1):
                world.barrier("the step to start")
                start = time.perf_counter()
                result = run_step(pipeline, counter, data, data)
                counter += 1
                if turn:  # the first step after a move opens channels
                    times[name].append(
                        maxima(pipeline.store.world, (time.perf_counter() - start,))[0]
                    )
                    idle[name].append(result.idle_ratio)
    for pipeline, _ in sides.values():
        Actions(pipeline).on_workload_change(())  # closes its channels
    return medians(times), medians(idle)


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
    lines: list[list[str]] = []
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
    return markdown(head, lines)
