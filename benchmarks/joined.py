"""Both papers at once: uneven layers, placements in a V, and schedules made for them.

Simulated, without links and without a barrier (the span counts). The costs are one moment of each
trace, per half block. A time of 1 is equal work on every rank without any bubble.

1f1b, zb-h1  as many blocks on each rank: what a user has without either paper, and with one
contiguous   halves of blocks, one stage per rank, with the order of zb-auto: the better one of the
             least busiest rank and the placement that the search finds
V, even      two stages per rank whose sums are as even as can be, with the order of zb-v
ours         the shorter of contiguous and v-auto, whose placement is searched by its span
bound        no placement and no schedule takes less: the smaller one of the two shapes' bounds

Small cases say how far v-auto is from the shortest schedule of its own placement: the exact solver
goes on from it for some seconds.

Emulated: 24 blocks on processes whose layers sleep, without a barrier, by v-auto.

zb-auto and v-auto keep at most 2 p microbatches alive on a rank. `kept` is the most of ours, over
the p of 1F1B.
"""

from __future__ import annotations

import argparse
import math
from statistics import fmean, median
from typing import Any

from benchmarks import cost_traces
from benchmarks.cost_traces import Layers, in_blocks, name_of, profile_of, timeline, trace
from benchmarks.harness import train
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
from dynmo.plan.bisection import exact
from dynmo.plan.chunks import chunked, flowing
from dynmo.plan.costs import one_microbatch, with_unit_memory
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.partition import Partition, stage_loads, uniform
from dynmo.plan.placement import place
from dynmo.plan.problem import Choice, Mesh, Problem
from dynmo.schedule.automatic.exact import exact as exact_schedule
from dynmo.schedule.generators import v_stage_ranks
from dynmo.schedule.simulator import simulate

CASES = (
    *cost_traces.CASES,
    ("early_exit", 2048),
)
BLOCKS, RANKS, TIMES = (24, 32, 40, 48), (8, 16, 24), (2, 4)
MOMENT = 18
SMALL = {"blocks": 24, "ranks": 6, "times": 2}
EMULATED = tuple(
    (case, ranks)
    for ranks in (8, 16)
    for case in ("freezing", "pruning", "sparse_attention", "early_exit")
)
SIDES = ("1f1b", "zb-h1", "contiguous", "V, even", "ours", "bound")


def row(
    case: str, sequence: int, blocks: int, ranks: int, times: int, moment: int
) -> dict[str, Any]:
    layers, m = trace(case, blocks, sequence)[moment], times * ranks
    perfect = m * math.fsum(layer.seconds for layer in layers) / ranks
    even, weights = uniform(blocks, ranks), [layer.seconds for layer in layers]
    seconds = {name: timeline(in_blocks(layers), even, m, name).span for name in ("1f1b", "zb-h1")}
    contiguous = _plan("zb-auto", layers, ranks, m)
    ours = _plan("v-auto", layers, ranks, m) if len(layers) >= 2 * ranks else contiguous
    ours = min(contiguous, ours, key=lambda plan: plan.step)
    seconds |= {
        "contiguous": min(
            contiguous.step, _span("zb-auto", layers, ranks, m, exact(weights, ranks))
        ),
        "V, even": _even_v(layers, ranks, m),
        "ours": ours.step,
        "bound": _bound(layers, ranks, m),
    }
    costs = with_unit_memory(ours.costs)
    one = one_microbatch(costs, ours.schedule.stage_ranks)
    kept = simulate(ours.schedule, costs).peak_memory
    return {
        "case": case,
        "sequence": sequence,
        "blocks": blocks,
        "ranks": ranks,
        "microbatches": m,
        "over_perfect": {side: seconds[side] / perfect for side in SIDES},
        "schedule": ours.schedule.name,
        "kept": max(kept) / max(one) / ranks,
    }


def _plan(schedule: str, layers: Layers, ranks: int, m: int) -> Plan:
    return place(Problem(profile_of(layers)), Mesh(ranks, 1, m, 1, schedule))


def _span(schedule: str, layers: Layers, ranks: int, m: int, partition: Partition) -> float:
    choice = Choice(Mesh(ranks, 1, m, 1, schedule), partition)
    return evaluate(Problem(profile_of(layers)), choice).step


def _even_v(layers: Layers, ranks: int, m: int) -> float:
    if len(layers) < 2 * ranks:
        return math.inf
    even = chunked([layer.seconds for layer in layers], v_stage_ranks(ranks))
    return _span("zb-v", layers, ranks, m, even)


def _bound(layers: Layers, ranks: int, m: int) -> float:
    weights = [layer.seconds for layer in layers]
    contiguous = m * max(stage_loads(weights, exact(weights, ranks)))
    if len(layers) < 2 * ranks:
        return contiguous
    _, bound = next(flowing(layers, v_stage_ranks(ranks), m, (1.0,)))
    return min(contiguous, m * bound)


def small(case: str, sequence: int, seconds: int) -> dict[str, Any]:
    """Lets the exact solver go on from v-auto's schedule of its own placement."""
    layers, ranks = trace(case, SMALL["blocks"], sequence)[MOMENT], SMALL["ranks"]
    m = SMALL["times"] * ranks
    plan = _plan("v-auto", layers, ranks, m)
    found = exact_schedule(plan.schedule, plan.costs, caps=plan.caps, seconds=seconds)
    perfect = m * math.fsum(layer.seconds for layer in layers) / ranks
    return {
        "case": case,
        "sequence": sequence,
        "v-auto": plan.step / perfect,
        "solver": simulate(found.schedule, plan.costs).span / perfect,
        "bound": found.bound / perfect,
        "proven": found.proven,
    }


def emulated(case: str, sequence: int, blocks: int, ranks: int, steps: int) -> dict[str, Any]:
    """Runs v-auto on processes whose layers sleep: 60 ms on average for an op of a stage."""
    layers, m = trace(case, blocks, sequence)[MOMENT], 2 * ranks
    plan = _plan("v-auto", layers, ranks, m)
    ops = [x for stage in plan.costs.stages for x in (stage.f, stage.b, stage.w) if x]
    unit = 0.06 / fmean(ops)
    events = train(
        {
            "model": {
                "kind": "emulated",
                "layers": len(layers),
                **{key: [unit * getattr(layer, key) for layer in layers] for key in "fbw"},
            },
            "train": {"steps": steps, "global_batch": m, "micro_batch": 1},
            "parallel": {"pipeline": ranks},
            "pipeline": {"schedule": "v-auto", "post_validation": True},
            "balance": {
                "balancer": "none",
                "every": steps // 2,
                "initial": list(plan.partition.counts),
            },
        }
    )
    # The schedule of the first half knows no costs. A decision ends it and the run, and ranks wait
    # for one another there: the steps on either side are left out.
    last = [event["seconds"] for event in events if event["event"] == "step"][steps // 2 + 1 : -1]
    return {
        "case": case,
        "sequence": sequence,
        "blocks": blocks,
        "ranks": ranks,
        "seconds": median(last),
        "simulated": unit * plan.step,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    stride, found = options.stride, dict[str, Any]()
    if options.only in ("all", "simulated"):
        found["moment"] = MOMENT
        found["rows"] = [
            row(case, sequence, blocks, ranks, times, MOMENT)
            for blocks in BLOCKS[::stride]
            for ranks in RANKS[::stride]
            for times in TIMES
            for case, sequence in CASES
        ]
        found["small"] = [small(case, sequence, options.seconds) for case, sequence in CASES]
    if options.only in ("all", "emulated"):
        found["emulated"] = [
            emulated(case, 2048, 24, ranks, options.steps) for case, ranks in EMULATED[::stride]
        ]
    return found


def table(result: dict[str, Any]) -> str:
    return _table(_deepest(result))


def _deepest(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows with the most blocks on the most ranks."""
    size = max((row["blocks"], row["ranks"]) for row in result["rows"])
    return [row for row in result["rows"] if (row["blocks"], row["ranks"]) == size]


def _table(rows: list[dict[str, Any]]) -> str:
    return markdown(
        ["case", "blocks", "ranks", "microbatches", *SIDES, "schedule", "kept, p"],
        [
            [
                name_of(row["case"], row["sequence"]),
                str(row["blocks"]),
                str(row["ranks"]),
                str(row["microbatches"]),
                *(f"{row['over_perfect'][side]:.2f}" for side in SIDES),
                row["schedule"],
                f"{row['kept']:.1f}",
            ]
            for row in rows
        ],
    )


def small_table(result: dict[str, Any]) -> str:
    rows = [
        [
            name_of(row["case"], row["sequence"]),
            *(f"{row[key]:.3f}" for key in ("v-auto", "solver", "bound")),
            "yes" if row["proven"] else "no",
        ]
        for row in result["small"]
    ]
    return markdown(["case", "v-auto", "solver", "its bound", "proven"], rows)


def emulated_table(result: dict[str, Any]) -> str:
    rows = [
        [
            name_of(row["case"], row["sequence"]),
            str(row["ranks"]),
            f"{row['seconds']:.2f}",
            f"{row['simulated']:.2f}",
            f"{row['seconds'] / row['simulated']:.3f}",
        ]
        for row in result["emulated"]
    ]
    return markdown(["case", "ranks", "step, s", "simulated, s", "ratio"], rows)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """What each paper brings, and both: the most blocks on the most ranks."""
    rows = _deepest(result)
    counts = sorted({row["microbatches"] for row in rows})
    figure, panels = pyplot().subplots(
        len(counts), figsize=(WIDTH, 2.6 * len(counts)), sharex=True, squeeze=False
    )
    looks = {
        "1f1b": ("neither (1F1B, even)", "#999999"),
        "zb-h1": ("Zero Bubble (ZB-H1, even)", "#e69f00"),
        "contiguous": ("DynMo with zb-auto, contiguous", "#56b4e9"),
        "V, even": ("zb-v, even loads", "#cc79a7"),
        "ours": ("both together", "#009e73"),
    }
    for axes, m in zip(panels[:, 0], counts, strict=True):
        own = [row for row in rows if row["microbatches"] == m]
        over = [row["over_perfect"] for row in own]
        sides = {name: (colour, [x[key] for x in over]) for key, (name, colour) in looks.items()}
        bars(axes, [name_of(row["case"], row["sequence"]) for row in own], sides)
        for x, one in enumerate(over):
            axes.plot([x - 0.45, x + 0.45], [one["bound"]] * 2, "k", label="lower bound")
        axes.set(
            title=f"{own[0]['ranks']} ranks, {m} microbatches",
            ylabel="span over perfect",
            ylim=(0.9, None),
        )
    legend_above(figure, 3)
    return {"joined": figure}


def show(result: dict[str, Any]) -> None:
    if "rows" in result:
        print(f"{_table(result['rows'])}\n\n{small_table(result)}\n")
    if "emulated" in result:
        print(emulated_table(result))


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    parser.add_argument("--only", choices=["all", "simulated", "emulated"], default="all")
    add_number(parser, "stride", 1, "take every n-th depth and number of ranks")
    add_number(parser, "steps", 10, "steps of emulated ranks")
    add_number(parser, "seconds", 30, "of the exact solver, for each small case")
    run(parser, measure, show, draw)


if __name__ == "__main__":
    main()
