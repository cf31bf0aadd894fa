"""Delays injected in channels: what balancing gains over a static placement (DynMo, figure 7).

Simulated with fixed seeds: the early-exit trace, 48 blocks on 24 ranks, ZB-H1 with 48 microbatches,
4 of the 24 moments. No rank emulates a slow channel. Each message takes its channel's base time x a
draw from a normal distribution. The draw is cut to 1 .. the delay factor. Its mean is the middle,
and the ends are 3 standard deviations away. The base is a share of an early stage's F. "between
nodes": 4 ranks are a node, and messages within a node take no time.

static     as many whole blocks on every rank
no links   half blocks, the least bottleneck (`exact` without links)
diffusion  half blocks, the balancer of this name. It knows the mean of each channel.
exact      half blocks, the balancer of this name. It knows the mean of each channel.

The figures are steps of `static` over steps of the others: sums over moments and draws. "static
takes" is its step over the one without delays.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cost_traces import Layers, in_halves, trace
from benchmarks.output import add_number, markdown, parser_of, pyplot, run, save_picture
from dynmo.balance.balancers import BalanceRequest, balancer
from dynmo.balance.partition import Partition, exact, uniform
from dynmo.balance.stage_costs import by_name, pipeline_costs
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Op, Schedule, in_order
from dynmo.schedule.simulator import duration

BLOCKS, RANKS, MICROBATCHES, NODE = 48, 24, 48, 4
STAGE_F = 2.0  # of two dense blocks
FACTORS = (1, 2, 3, 4)
SETTINGS = (("every channel", 0.05), ("every channel", 0.5), ("between nodes", 0.5))
SIDES = ("no links", "diffusion", "exact")


def base_of(where: str, share: float) -> list[float]:
    """Returns the seconds of a message over each boundary without delay."""
    slow = [where == "every channel" or rank % NODE == NODE - 1 for rank in range(RANKS - 1)]
    return [share * STAGE_F * is_slow for is_slow in slow]


def placements(layers: Layers, means: Sequence[float]) -> dict[str, Partition]:
    # Costs of a trace have no sizes, so a link's time is its latency.
    request = BalanceRequest(
        layers,
        in_halves(uniform(BLOCKS, RANKS)),
        make=by_name("zb-h1", MICROBATCHES),
        links=tuple(LinkCost(mean, math.inf) for mean in means),
        objective=Objective.MAKESPAN,
    )
    return {
        "static": request.current,
        "no links": exact(request.weights, RANKS, current=request.current),
        "diffusion": balancer("diffusion")(request),
        "exact": balancer("exact")(request),
    }


def drawn(draw: random.Random, factor: float) -> float:
    return min(factor, max(1.0, draw.gauss((1 + factor) / 2, (factor - 1) / 6)))


def makespan(
    schedule: Schedule,
    layers: Sequence[LayerCost],
    placement: Partition,
    base: Sequence[float],
    factor: float,
    seed: int,
) -> float:
    """Replays a step. Each message of all placements has the same draw."""
    costs, draw = pipeline_costs(layers, placement), random.Random(seed)
    ended: dict[Op, float] = {}
    clock = [0.0] * schedule.ranks
    for rank, op, needs in in_order(schedule):
        start = clock[rank]
        for before, boundary in needs:
            late = 0.0 if boundary is None else base[boundary] * drawn(draw, factor)
            start = max(start, ended[before] + late)
        clock[rank] = ended[op] = start + duration(costs, op)
    return max(clock)


def row(where: str, share: float, factor: int, stride: int, draws: int) -> dict[str, Any]:
    base = base_of(where, share)
    means = [seconds * (1 + factor) / 2 for seconds in base]
    schedule = by_name("zb-h1", MICROBATCHES)(pipeline_costs(LAYERS, uniform(RANKS, RANKS)))
    total: dict[str, float] = dict.fromkeys(("static", *SIDES), 0.0)
    for layers in trace("early_exit", BLOCKS, 2048)[::stride]:
        for name, placement in placements(layers, means).items():
            for seed in range(draws):
                total[name] += makespan(schedule, layers, placement, base, factor, seed)
    gains = {name: total["static"] / total[name] for name in SIDES}
    return {"where": where, "base": share, "factor": factor, "static": total["static"]} | gains


LAYERS = (LayerCost(1.0, 1.0, 1.0),) * RANKS


def measure(options: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for where, share in SETTINGS[: options.settings]:
        own = [row(where, share, factor, options.stride, options.draws) for factor in FACTORS]
        rows += [x | {"static": x["static"] / own[0]["static"]} for x in own]
    return {"rows": rows}


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        [
            f"{x['where']}, {x['base']:.0%} of F",
            str(x["factor"]),
            f"{x['static']:.2f}",
            *(f"{x[name]:.3f}" for name in SIDES),
        ]
        for x in rows
    ]
    return markdown(["delays", "up to", "static takes", *SIDES], lines)


def draw_picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    plt = pyplot()
    settings = list(dict.fromkeys((x["where"], x["base"]) for x in rows))
    figure, panels = plt.subplots(
        1, len(settings), figsize=(8, 2.8), sharey=True, squeeze=False, layout="constrained"
    )
    for (where, share), axes in zip(settings, panels[0], strict=True):
        own = [x for x in rows if (x["where"], x["base"]) == (where, share)]
        for name, colour in zip(SIDES, ("#999999", "#d55e00", "#0072b2"), strict=True):
            axes.plot(
                [x["factor"] for x in own],
                [x[name] for x in own],
                marker="o",
                markersize=3,
                color=colour,
                label=name,
            )
        axes.set(title=f"{where}, {share:.0%} of F", xlabel="delays up to", xticks=FACTORS)
    panels[0][0].set_ylabel("speed-up over static")
    panels[0][-1].legend(frameon=False)
    save_picture(figure, path)


def main() -> None:
    parser = parser_of(__doc__, picture="delays", reads=True)
    add_number(parser, "stride", 6, "of the 24 moments, every so many-th")
    add_number(parser, "draws", 3, "draws of all messages")
    add_number(parser, "settings", len(SETTINGS), "so many of the settings")
    run(
        parser,
        measure,
        lambda result: print(table(result["rows"])),
        lambda result, path: draw_picture(result["rows"], path),
    )


if __name__ == "__main__":
    main()
