"""Fixed cost traces on 24 ranks: their distance to perfect balance, simulated.

The traces have 48 blocks (benchmarks/data/traces). The schedule is ZB-H1 with 48 microbatches.
There are no link times, and reductions take none either.

blocks      whole blocks, the best placement for each moment
halves      halves of blocks, the same
reshaped    halves, and on the same 24 ranks a shorter pipeline with more replicas, the
            microbatches split among them: the best whose ranks fit. memory x2: half the depth
            fits, no third; x4: a quarter fits, no sixth
perfect     24 ranks that each have the same part of all work

loads       the gain over as many blocks on every rank, by the busiest rank's work in a step
seconds     the same by the simulated step, with the filling of the pipeline. A shorter pipeline
            fills sooner, so it can be over 100 % of perfect.
shares      of perfect's gain; the aim is 95 %
decided     what `balance.reshape` does from moment to moment, 50 steps each: how often it changes
            the mesh, and the mean step
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.cost_traces import (
    Layers,
    bottleneck,
    in_blocks,
    in_halves,
    name_of,
    perfect,
    problem_of,
    timeline,
    trace,
)
from benchmarks.output import (
    WIDTH,
    add_number,
    bars,
    legend_above,
    markdown,
    parser_of,
    pyplot,
    run,
)
from dynmo.plan.best import search
from dynmo.plan.bisection import exact
from dynmo.plan.decide import decide
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.options import Balance
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.problem import Allowed, Choice, Kind, Mesh, Problem, Readings, Rules

CASES = (
    ("early_exit", 2048),
    ("freezing", 2048),
    ("pruning", 2048),
    ("sparse_attention", 2048),
    ("sparse_attention", 32768),
    ("moe", 2048),
    ("mixture_of_depths", 2048),
)
BLOCKS, RANKS, MICROBATCHES = 48, 24, 48
MEMORY = (2, 4)  # times the even share of weights
STEPS = 50  # a moment
AIM = 0.95


def asked(layers: Layers, memory: int) -> tuple[Problem, Allowed]:
    """Returns the dense model's sizes, and the meshes of the same ranks.

    Sizes are in thirds of a block.

    Pruned or frozen layers still count, as they may come back. The limit is just under what the
    next shorter pipeline needs.
    """
    sized = tuple(replace(x, weight_bytes=2 if i % 2 else 1) for i, x in enumerate(layers))
    share = sum(x.weight_bytes for x in sized) // RANKS
    limit = share * next(r for r in range(memory + 1, RANKS + 1) if RANKS % r == 0) - 1
    problem = replace(problem_of(sized), memory_limit=limit)
    return problem, Allowed(RANKS, MICROBATCHES, (1,), ("zb-h1",), keep=4)


def decided(problem: Problem, now: Choice, seconds_per_byte: float) -> tuple[bool, Plan]:
    """Returns whether `elastic.reshape` or the balancer changes a run, and the plan from then on.

    A gain counts as certain, and each moment has some steps.
    """
    problem = replace(problem, work=replace(problem.work, end=STEPS))
    plan = evaluate(problem, now)
    readings = Readings((problem.layers,) * 2, seconds_per_byte=seconds_per_byte)
    kinds: tuple[Kind, ...] = ("mesh", "placement")
    for kind in kinds:
        decision = decide(problem, plan, Rules(kind, Balance(margin=1.5)), readings)
        if decision.verdict.pays:
            return True, decision.plan
    return False, plan


def busiest(plan: Plan) -> float:
    """Returns the seconds of work of the busiest rank in a step."""
    return plan.mesh.microbatches * max(plan.rank_cost)


def row(case: str, sequence: int, stride: int) -> dict[str, Any]:
    """Measures one line of the table."""
    moments = trace(case, BLOCKS, sequence)[::stride]
    loads: dict[str, float] = {}
    seconds: dict[str, float] = {}
    meshes: dict[str, list[str]] = {}
    for layers in moments:
        sides, fits = sides_at(layers)
        for name, (load, step) in sides.items():
            loads[name] = loads.get(name, 0.0) + load / len(moments)
            seconds[name] = seconds.get(name, 0.0) + step / len(moments)
        for name, mesh in fits.items():
            meshes.setdefault(name, []).append(f"{mesh.pipeline}x{mesh.replicas}")
    gains = {
        kind: {name: x["uniform"] / value for name, value in x.items()}
        for kind, x in (("loads", loads), ("seconds", seconds))
    }
    shares = {
        kind: {name: x / gain["perfect"] for name, x in gain.items()}
        for kind, gain in gains.items()
    }
    return {
        "case": case,
        "sequence": sequence,
        "moments": len(moments),
        "gains": gains,
        "shares": shares,
        "meshes": {
            name: {mesh: chosen.count(mesh) for mesh in sorted(set(chosen))}
            for name, chosen in meshes.items()
        },
        "decided": {f"memory x{memory}": decisions(moments, memory) for memory in MEMORY},
    }


def sides_at(layers: Layers) -> tuple[dict[str, tuple[float, float]], dict[str, Mesh]]:
    """Measures all sides at one moment.

    Returns:
        The busiest rank's work in a step and the simulated step of each side, in seconds. The mesh
        of each reshaped side.
    """
    whole, even = in_blocks(layers), uniform(BLOCKS, RANKS)
    ideal = perfect(layers, RANKS, MICROBATCHES)
    sides = {
        "uniform": load_and_step(whole, even),
        "perfect": (
            MICROBATCHES * math.fsum(x.seconds for x in layers) / RANKS,
            ideal.makespan,
        ),
    }
    for name, parts in (("blocks", whole), ("halves", layers)):
        sides[name] = load_and_step(parts, exact([x.seconds for x in parts], RANKS))
    meshes: dict[str, Mesh] = {}
    for memory in MEMORY:
        name = f"reshaped, memory x{memory}"
        fits = search(*asked(layers, memory)).plans
        sides[name] = min(map(busiest, fits)), fits[0].seconds
        meshes[name] = fits[0].mesh
    return sides, meshes


def load_and_step(layers: Layers, partition: Partition) -> tuple[float, float]:
    """Returns the busiest rank's work in a step, and the simulated step, in seconds."""
    load = MICROBATCHES * bottleneck(layers, partition)
    return load, timeline(layers, partition, MICROBATCHES).makespan


def decisions(moments: Sequence[Layers], memory: int) -> dict[str, Any]:
    """Replays the decisions of `balance.reshape` from moment to moment."""
    start = in_halves(uniform(BLOCKS, RANKS))
    now = Choice(Mesh(RANKS, 1, MICROBATCHES, 1, "zb-h1"), start)
    changes, seconds = 0, 0.0
    for layers in moments:
        changed, plan = decided(asked(layers, memory)[0], now, 0.1)
        changes += changed
        now = plan.choice
        seconds += plan.seconds / len(moments)
    last = f"{now.mesh.pipeline}x{now.mesh.replicas}"
    return {"changes": changes, "seconds": seconds, "last": last}


def measure(stride: int, cases: int) -> dict[str, Any]:
    """Measures the lines of the table."""
    rows = [row(case, sequence, stride) for case, sequence in CASES[:cases]]
    least = min(x["shares"]["loads"][f"reshaped, memory x{MEMORY[-1]}"] for x in rows)
    return {
        "blocks": BLOCKS,
        "ranks": RANKS,
        "microbatches": MICROBATCHES,
        "rows": rows,
        "aim": AIM,
        "least_share_of_perfect": least,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the gains by load, in Markdown."""
    names = ["blocks", "halves", *(f"reshaped, memory x{m}" for m in MEMORY), "perfect"]
    lines: list[list[str]] = []
    for x in rows:
        gain = x["gains"]["loads"]
        share = x["shares"]["loads"][names[-2]]
        gains = [f"{gain[name]:.2f}" for name in names]
        lines.append([name_of(x["case"], x["sequence"]), *gains, f"{100 * share:.1f} %"])
    return markdown(["case", *names, "of perfect"], lines)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the share of perfect balance that each side reaches."""
    rows = result["rows"]
    figure, axes = pyplot().subplots(figsize=(WIDTH, 3.8))
    names = ["blocks", "halves", *(f"reshaped, memory x{m}" for m in MEMORY)]
    colours = ("#999999", "#d55e00", "#56b4e9", "#0072b2")
    sides = {
        name: (colour, [100 * x["shares"]["loads"][name] for x in rows])
        for name, colour in zip(names, colours, strict=True)
    }
    bars(axes, [name_of(x["case"], x["sequence"]) for x in rows], sides)
    axes.axhline(100 * AIM, color="#333333", linewidth=1, linestyle="--", label=f"aim: {AIM:.0%}")
    axes.set(ylabel=f"% of perfect balance on {RANKS} ranks", ylim=(50, 102))
    legend_above(figure, 3)
    return {"reshape": figure}


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "stride", 1, "of the 24 moments, every so many-th")
    add_number(parser, "cases", len(CASES), "so many of the cases")
    run(
        parser,
        lambda options: measure(options.stride, options.cases),
        lambda result: print(table(result["rows"])),
        draw,
    )


if __name__ == "__main__":
    main()
