"""The gain of a solver's proof over the heuristic, case by case.

Each case has zb-auto's span, the best span that CP-SAT finds from it, and what CP-SAT proves.

The named cases of the Zero Bubble paper's ILP have p ranks, m microbatches and memory for p or 2p
microbatches. They are solved at equal times and at the published times of two models. Two published
settings are solved at full size. Uneven stages are drawn at random, with links and memory limits
between two microbatches and 2p. Some have a frozen prefix. The table shows only the uneven cases
where the solver found something shorter or proved nothing. The bound is `lower_bound`'s, made
without any search.

    gain = 1 - exact span / auto span        room = 1 - bound / exact span
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from random import Random
from statistics import mean, median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.output import add_number, parser_of, run
from benchmarks.published import costs_of, table_5
from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.schedule.automatic.exact import exact
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.simulator import simulate


class Case(NamedTuple):
    name: str
    costs: Costs
    microbatches: int
    caps: list[float]
    first_trainable: int = 0


def published_cases() -> Iterator[Case]:
    rows = [row for row in table_5() if row["microbatches"] == 24]
    for p, m, k in ((3, 4, 1), (4, 6, 1), (4, 8, 2)):
        yield Case(f"F = B = W  p {p} m {m} memory {k}p", uniform_costs(p, 1, 1, 1), m, [k * p] * p)
        for row in rows:
            yield Case(f"{row['model']}  p {p} m {m} memory {k}p", costs_of(row, p), m, [k * p] * p)
    for row in rows:
        for k in (1, 2):
            p = row["ranks"]
            yield Case(f"{row['model']}  p {p} m 24 memory {k}p", costs_of(row), 24, [k * p] * p)


def uneven_cases(count: int) -> Iterator[Case]:
    for seed in range(count):
        random = Random(seed)
        p = random.randint(3, 8)
        m = random.randint(2, 2 * p)
        times = (
            (random.randint(400, 1600), random.randint(400, 1600), random.randint(100, 1000))
            for _ in range(p)
        )
        costs = Costs(
            tuple(StageCost(*three) for three in times),
            tuple(random.randint(0, 100) for _ in range(p - 1)),
        )
        caps = [random.randint(4, 4 * p) / 2 for _ in range(p)]
        frozen = random.choice([0, 0, 0, 1, p // 2])
        yield Case(
            f"uneven {seed}  p {p} m {m}" + (f" frozen {frozen}" if frozen else ""),
            costs,
            m,
            caps,
            frozen,
        )


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Solves one case."""
    given = {"caps": case.caps, "first_trainable": case.first_trainable}
    auto = automatic(case.costs, case.microbatches, **given)
    result = exact(auto, case.costs, caps=case.caps, seconds=seconds)
    heuristic, best = simulate(auto, case.costs).span, simulate(result.schedule, case.costs).span
    bound = lower_bound(
        case.costs, case.microbatches, case.first_trainable, Objective.SPAN, case.caps
    )
    return {
        "case": case.name,
        "auto": heuristic,
        "exact": best,
        "gain": 1 - best / heuristic,
        "bound": bound,
        "room": 1 - bound / best,
        "proven": result.proven,
        "proven_bound": result.bound,
        "seconds": result.seconds,
    }


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    uneven = [measure(case, options.seconds) for case in uneven_cases(options.uneven)]
    return {
        "published": [measure(case, options.seconds) for case in published_cases()],
        "uneven": [row for row in uneven if row["gain"] > 1e-9 or not row["proven"]],
        "uneven_summary": summary(uneven),
        "limit": options.seconds,
    }


def show(result: dict[str, Any]) -> None:
    console = Console(width=120)
    console.print(table([*result["published"], *result["uneven"]]))
    console.print(result["uneven_summary"])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "cases": len(rows),
        "proven": sum(row["proven"] for row in rows),
        "auto_optimal": sum(row["proven"] and row["gain"] < 1e-9 for row in rows),
        "bound_within_1_percent": sum(row["room"] <= 0.01 for row in rows),
        "mean_gain": mean(row["gain"] for row in rows),
        "most_gain": max(row["gain"] for row in rows),
        "mean_room": mean(row["room"] for row in rows),
        "most_room": max(row["room"] for row in rows),
        "median_seconds": median(row["seconds"] for row in rows),
    }


def table(rows: list[dict[str, Any]]) -> Table:
    output = Table("case", "auto", "exact", "gain %", "bound", "room %", "proven", "seconds")
    for row in rows:
        gain, room = (f"{abs(100 * row[name]):.2f}" for name in ("gain", "room"))
        proven = "yes" if row["proven"] else f"{row['proven_bound']:.6g}"
        output.add_row(
            row["case"],
            f"{row['auto']:.6g}",
            f"{row['exact']:.6g}",
            gain,
            f"{row['bound']:.6g}",
            room,
            proven,
            f"{row['seconds']:.2f}",
        )
    return output


def main() -> None:
    parser = parser_of(__doc__)
    add_number(parser, "seconds", 30, "the solver's limit for each case")
    add_number(parser, "uneven", 100, "cases of uneven stages")
    run(parser, measure_all, show)


if __name__ == "__main__":
    main()
