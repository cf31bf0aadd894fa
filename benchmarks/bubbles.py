"""Bubbles of the schedule and bubbles of imbalance, apart.

They are figure 5 and equation 1 of DynMo's paper. The simulator times everything.

traces    each cost trace (benchmarks/data/traces), its 24 moments by ZB-H1 with the paper's four
          microbatches for each rank and without link times. Halves of blocks are placed by `exact`
          even            as many blocks on each rank
          balanced        by the costs of the moment before, where that gains 2 % at least
          known at once   by the moment's own costs, unless the even placement is faster
          `idle` is 1 - mean busy time of the ranks / span. The inherent bubble is that of equal
          stages, the imbalance bubble is the rest of `idle`. Experts and depths run on the paper's
          16 ranks, the others on its 24
equation  equation 1 (appendix B) beside the bubble of this project's schedules at equal stages.
          T_F = 1 is a stage's forward pass, T_B = 2 its whole backward pass (B = W = 1), T_C a
          link's time. The equation knows no number of microbatches. Its denominator counts the
          work of P of them, so P is compared, and 4 P as the paper trains. Schedules made from
          costs keep up to 2 P microbatches alive. `ratio` is the equation's over ZB-H1's
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean
from typing import Any

from benchmarks.cost_traces import (
    CASES,
    Layers,
    in_halves,
    name_of,
    perfect,
    timeline,
    trace,
)
from benchmarks.output import (
    WIDTH,
    add_number,
    legend_above,
    markdown,
    parser_of,
    pyplot,
    run,
)
from dynmo.cost.layer_cost import uniform_costs
from dynmo.plan.bisection import exact
from dynmo.plan.costs import roomy_caps
from dynmo.plan.partition import Partition, uniform
from dynmo.schedule.catalogue import make, stage_ranks_of
from dynmo.schedule.simulator import simulate

# Case, sequence, blocks, ranks, and the paper's idle before and after balancing.
SETTINGS = (
    *((case, sequence, 48, 24, None) for case, sequence in CASES),
    ("early_exit", 2048, 48, 24, None),
    ("mixture_of_depths", 2048, 32, 16, (0.18, 0.04)),
    ("moe", 2048, 32, 16, (0.25, 0.08)),
)
SIDES = ("even", "balanced", "known at once")
HYSTERESIS = 0.02
WORKERS = (4, 8, 12, 16, 20, 24)
FACTORS = (1, 4)  # microbatches for each rank
LINKS = (0.0, 0.1)
SCHEDULES = ("zb-h1", "zb-h2", "zb-auto", "v-auto")


# -- traces ----------------------------------------------------------------------------------------


Timed = Callable[[int, Partition], tuple[float, float]]
"""Makespan and idle ratio of a moment on a placement."""


def placements(
    moments: Sequence[Layers], ranks: int, timed: Timed
) -> dict[str, Sequence[Partition]]:
    """Places the half blocks of each moment, by side."""
    even = in_halves(uniform(len(moments[0]) // 2, ranks))
    known = [
        min(even, exact([x.seconds for x in layers], ranks), key=lambda x: timed(moment, x))
        for moment, layers in enumerate(moments)
    ]
    balanced = [even]
    for moment, proposed in enumerate(known[:-1]):
        now, then = (timed(moment, x)[0] for x in (balanced[-1], proposed))
        balanced.append(proposed if then <= (1 - HYSTERESIS) * now else balanced[-1])
    return dict(zip(SIDES, ([even] * len(moments), balanced, known), strict=True))


def row(
    case: str,
    sequence: int,
    blocks: int,
    ranks: int,
    paper: tuple[float, float] | None,
    stride: int = 1,
) -> dict[str, Any]:
    """Measures both bubbles at each moment of a trace."""
    moments, microbatches = trace(case, blocks, sequence)[::stride], 4 * ranks

    @cache
    def timed(moment: int, placement: Partition) -> tuple[float, float]:
        step = timeline(moments[moment], placement, microbatches)
        return step.makespan, step.idle_ratio

    inherent = [perfect(layers, ranks, microbatches).idle_ratio for layers in moments]
    idle = {
        side: [timed(moment, x)[1] for moment, x in enumerate(each)]
        for side, each in placements(moments, ranks, timed).items()
    }
    return {
        "case": name_of("experts" if case == "moe" else case, sequence),
        "blocks": blocks,
        "ranks": ranks,
        "microbatches": microbatches,
        "inherent": fmean(inherent),
        "idle": {side: fmean(values) for side, values in idle.items()},
        "imbalance": {side: fmean(values) - fmean(inherent) for side, values in idle.items()},
        "paper": paper or (),
        "moments": {"inherent": inherent, "idle": idle},
    }


# -- equation --------------------------------------------------------------------------------------


def equation_1(p: int, t_f: float, t_b: float, t_c: float) -> float:
    """Returns the bubble ratio of equation 1 for P workers."""
    gaps = p**2 / 2 - p
    idle = (3 * gaps + 6 * p - 2 * gaps / p - 8) * t_c + 2 * gaps * t_b
    return idle / ((3 * p**2 - 2 * p) * t_c + (2 * p**2 - 2 * p) * t_b + p**2 * t_f)


def inherent(schedule: str, ranks: int, microbatches: int, link: float) -> float:
    """Returns the bubble of a schedule at equal stages whose F, B and W take 1 on each rank."""
    stage_ranks = stage_ranks_of(schedule, ranks, None)
    part = ranks / len(stage_ranks)
    costs = uniform_costs(len(stage_ranks), part, part, part, link)
    caps = roomy_caps(costs, stage_ranks)
    return simulate(make(schedule, ranks, microbatches, costs=costs, caps=caps), costs).idle_ratio


def equation(workers: Sequence[int]) -> list[dict[str, Any]]:
    return [
        _equation_row(ranks, factor * ranks, link)
        for link in LINKS
        for factor in FACTORS
        for ranks in workers
    ]


def _equation_row(ranks: int, microbatches: int, link: float) -> dict[str, Any]:
    formula = equation_1(ranks, 1, 2, link)
    simulated = {schedule: inherent(schedule, ranks, microbatches, link) for schedule in SCHEDULES}
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "link": link,
        "equation_1": formula,
        "simulated": simulated,
        "ratio": formula / simulated["zb-h1"],
    }


# -- output ----------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns both bubbles of the traces in Markdown."""
    head = ["case", "blocks", "ranks", "inherent", *(f"imbalance, {side}" for side in SIDES)]
    head += ["idle, even to balanced", "the paper's"]
    lines: list[list[str]] = []
    for x in rows:
        bubbles = (x["inherent"], *(x["imbalance"][side] for side in SIDES))
        pairs = ((x["idle"]["even"], x["idle"]["balanced"]), x["paper"])
        lines.append(
            [x["case"], str(x["blocks"]), str(x["ranks"])]
            + [f"{100 * share:.1f} %" for share in bubbles]
            + ["-" if not pair else f"{pair[0]:.0%} to {pair[1]:.0%}" for pair in pairs]
        )
    return markdown(head, lines)


def equation_table(rows: Sequence[dict[str, Any]], links: Sequence[float] = LINKS) -> str:
    """Returns equation 1 beside the schedules in Markdown."""
    head = ["P", "microbatches", "T_C", "equation 1", *SCHEDULES]
    lines = [
        [
            str(x["ranks"]),
            str(x["microbatches"]),
            f"{x['link']:g}",
            f"{100 * x['equation_1']:.1f} %",
        ]
        + [f"{100 * x['simulated'][schedule]:.1f} %" for schedule in SCHEDULES]
        for x in rows
        if x["link"] in links
    ]
    return markdown(head, lines, "r" * len(head))


def show(result: dict[str, Any]) -> None:
    if "traces" in result:
        print(table(result["traces"]), end="\n\n")
    if "equation" in result:
        print(equation_table(result["equation"]))


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws both bubbles of each trace by moment, and equation 1 by P."""
    if not {"traces", "equation"} <= set(result):
        return {}
    figure, panels = pyplot().subplot_mosaic("012;345;6RR", figsize=(WIDTH, 7))
    *moments, last = panels.values()
    for panel, row in zip(moments, result["traces"], strict=False):
        inherent, idle = row["moments"]["inherent"], row["moments"]["idle"]
        x = range(len(inherent))
        percent = {side: [100 * share for share in values] for side, values in idle.items()}
        base = [100 * share for share in inherent]
        panel.fill_between(x, base, color="#bbbbbb", label="inherent")
        panel.fill_between(x, base, percent["even"], color="#d55e00", alpha=0.35)
        panel.plot(x, percent["even"], "--", color="#d55e00", label="even")
        panel.plot(x, percent["balanced"], color="#0072b2", label="balanced")
        panel.plot(x, percent["known at once"], ":", color="black", label="known at once")
        panel.set(title=row["case"], xlabel=f"moment ({row['ranks']} ranks)", ylim=(0, 70))
    for panel in moments[::3]:
        panel.set_ylabel("idle, % of a step")
    legend_above(figure, 4)  # of the moments
    rows = [x for x in result["equation"] if not x["link"] and x["microbatches"] == x["ranks"]]
    ranks = [x["ranks"] for x in rows]
    last.plot(ranks, [100 * x["equation_1"] for x in rows], "k--", label="equation 1")
    # The first three nearly coincide.
    looks = ("#d55e00", "s-", 10), ("#e69f00", "D-", 7), ("#0072b2", "o-", 4), ("#009e73", "v:", 4)
    for schedule, (colour, look, size) in zip(SCHEDULES, looks, strict=True):
        shares = [100 * x["simulated"][schedule] for x in rows]
        last.plot(ranks, shares, look, color=colour, markersize=size, label=schedule)
    last.set(title="equal stages, P microbatches", xlabel="P", ylim=(0, None), xticks=ranks)
    last.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return {"bubbles": figure}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures both parts, or the one of `--only`."""
    result: dict[str, Any] = {"simulated": True}
    if options.only != "equation":
        result["traces"] = [row(*setting, stride=options.stride) for setting in SETTINGS]
    if options.only != "traces":
        result["equation"] = equation(options.workers)
    return result


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "stride", 1, "of the 24 moments, every so many-th")
    parser.add_argument("--only", choices=("traces", "equation"), help="one of the parts")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=WORKERS, help="the P of equation 1"
    )
    run(
        parser,
        measure,
        show,
        draw,
    )


if __name__ == "__main__":
    main()
