"""Delays injected in channels: what balancing gains over a static placement (DynMo, figure 7).

Simulated with fixed seeds: the early-exit trace, 48 blocks on 24 ranks, ZB-H1 with 48 microbatches,
4 of the 24 moments. Each message takes its channel's base time x a
draw from a normal distribution. The draw is cut to 1 .. the delay factor. Its mean is the middle,
and the ends are 3 standard deviations away. The base is a share of an early stage's F. "between
nodes": 4 ranks are a node, and messages within a node take no time.

static     as many whole blocks on every rank
no links   half blocks, the least bottleneck (`exact` without links)
diffusion  half blocks, the balancer of this name. It knows the mean of each channel.
exact      half blocks, the balancer of this name. It knows the mean of each channel.

The figures are steps of `static` over steps of the others: sums over moments and draws. "static
takes" is its step over the one without delays.

Emulated: one moment on 8 processes whose channels are slow (`benchmarks.delays_emulated`).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.cost_traces import trace
from benchmarks.delay_model import base_of, makespan, placements
from benchmarks.delays_emulated import emulated_table
from benchmarks.harness import run_ranks
from benchmarks.output import (
    WIDTH,
    add_number,
    legend_above,
    markdown,
    parser_of,
    pyplot,
    run,
)
from dynmo.schedule.catalogue import make

BLOCKS, RANKS = 48, 24
FACTORS = (1, 2, 3, 4)
SETTINGS = (("every channel", 0.05), ("every channel", 0.5), ("between nodes", 0.5))
SIDES = ("no links", "diffusion", "exact")
EMULATED = 8  # ranks


def row(where: str, share: float, factor: int, stride: int, draws: int) -> dict[str, Any]:
    base = base_of(where, share, BLOCKS, RANKS)
    means = [seconds * (1 + factor) / 2 for seconds in base]
    schedule = make("zb-h1", RANKS, 2 * RANKS)
    total: dict[str, float] = dict.fromkeys(("static", *SIDES), 0.0)
    for layers in trace("early_exit", BLOCKS, 2048)[::stride]:
        for name, placement in placements(layers, means, RANKS).items():
            for seed in range(draws):
                total[name] += makespan(schedule, layers, placement, base, factor, seed)
    gains = {name: total["static"] / total[name] for name in SIDES}
    return {"where": where, "base": share, "factor": factor, "static": total["static"]} | gains


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures both parts, or the one of `--only`."""
    result: dict[str, Any] = {}
    if options.only in ("all", "simulated"):
        result |= simulated(options)
    if options.only in ("all", "emulated"):
        given = {"share": 0.5, "factors": FACTORS[::3], "pairs": options.pairs, "steps": 1}
        given |= {"shortest": options.shortest}
        result["emulated"] = run_ranks("benchmarks.delays_emulated:emulate", EMULATED, **given)
    return result


def simulated(options: argparse.Namespace) -> dict[str, Any]:
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


def show(result: dict[str, Any]) -> None:
    if "rows" in result:
        print(table(result["rows"]))
    if "emulated" in result:
        print(f"\n{emulated_table(result['emulated'])}")


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the speed-up of each side by the longest delay: a panel for each setting."""
    rows = result["rows"]
    plt = pyplot()
    settings = list(dict.fromkeys((x["where"], x["base"]) for x in rows))
    figure, panels = plt.subplots(
        1, len(settings), figsize=(WIDTH, 2.8), sharey=True, squeeze=False
    )
    for (where, share), axes in zip(settings, panels[0], strict=True):
        own = [x for x in rows if (x["where"], x["base"]) == (where, share)]
        looks = (("#777777", "s:"), ("#d55e00", "^--"), ("#0072b2", "o-"))
        for name, (colour, look) in zip(SIDES, looks, strict=True):
            x, y = [x["factor"] for x in own], [x[name] for x in own]
            axes.plot(x, y, look, color=colour, label=name)
        axes.set(title=f"{where}, {share:.0%} of F", xlabel="delays up to", xticks=FACTORS)
    panels[0][0].set_ylabel("speed-up over static")
    legend_above(figure, len(SIDES))
    return {"delays": figure}


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "stride", 6, "of the 24 moments, every so many-th")
    add_number(parser, "draws", 3, "draws of all messages")
    add_number(parser, "settings", len(SETTINGS), "so many of the settings")
    add_number(parser, "pairs", 3, "turns of the emulated placements")
    add_number(parser, "shortest", 0.01, "seconds of the shortest emulated op")
    parser.add_argument("--only", choices=["all", "simulated", "emulated"], default="all")
    run(parser, measure, show, draw)


if __name__ == "__main__":
    main()
