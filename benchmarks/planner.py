"""The planner: against published schedules, on uneven stages, and its seconds.

published    bubble = 1 - m (F + B + W) / span in the 12 settings of the Zero Bubble paper, with
             memory for p and for 2p microbatches: as published, ours, and the least that
             `lower_bound` leaves possible
uneven       random stages (p 2-24, m 1-4p, times spread by up to 60 %, links, frozen prefixes,
             uneven memory and limits). The span of a plan made from the stages' own times is
             divided by that of a plan made from their median, as the published planner is fed.
             Both are within the true limits and replayed at the true times.
seconds      to a schedule in a warm process, and from the start of Python in a new one, by then
             with the compiled code on disk; and in the very first one, which compiles it. The
             best of several runs, on uneven stages.

growth       the warm seconds by p, and by m. The curve is not smooth: a search ends where it meets
             the bound, and its budget grows from 24 ranks and 96 microbatches on.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.harness import elapsed
from benchmarks.output import WIDTH, add_number, parser_of, pyplot, run
from benchmarks.published import costs_of, table_5
from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import DynmoError
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.op import validate
from dynmo.schedule.simulator import simulate

ROOT = Path(__file__).parents[1]

SIZES = {
    (24, 96): (0.02, 1.0),
    (32, 256): (0.2, 1.5),
    (64, 512): (1.0, 3.0),
}  # and the seconds aimed at, warm and cold


def published() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for row in table_5():
        p, m = row["ranks"], row["microbatches"]
        costs = costs_of(row)
        for k in (1, 2):
            caps = [k * p] * p
            timeline = simulate(automatic(costs, m, caps=caps), costs)
            bound = lower_bound(costs, m, caps=caps)
            rows.append(
                {
                    "case": f"{row['model']} p {p} m {m} memory {k}p",
                    "published": row["bubble"][f"zb-{k}p"],
                    "ours": timeline.bubble_ratio,
                    "least": max(0.0, 1 - m * costs.stages[0].seconds / bound),
                    "gap": max(0.0, timeline.span / bound - 1),
                    "peak": max(timeline.peak_memory) / p,
                }
            )
    return rows


def uneven_case(random: Random) -> tuple[Costs, Costs, int, list[float], int]:
    """Draws an uneven pipeline.

    Returns:
        Costs, the same costs with every stage's times at their median, microbatches, caps, and the
        first trainable stage.
    """
    p = random.randint(2, 24)
    m, spread = random.randint(1, 4 * p), random.uniform(0, 0.6)
    first = random.randrange(1, p) if random.random() < 0.2 else 0
    base = (10.0, random.uniform(7, 15), random.uniform(3, 12))
    together = random.random() < 0.5  # a long stage is long in F, B and W, or each is drawn alone
    times: list[list[float]] = []
    for _ in range(p):
        common = random.uniform(-spread, spread)
        times.append(
            [x * (1 + (common if together else random.uniform(-spread, spread))) for x in base]
        )
    middle = [median(column) for column in zip(*times[first:], strict=True)]
    links = tuple(random.uniform(0, 2) for _ in range(p - 1))
    memory = [(held := random.uniform(0.5, 1.5), held * random.uniform(0.1, 1.1)) for _ in range(p)]
    roomy = random.random() < 0.5
    caps = [
        max(held, stash) * (1 + random.uniform(p if roomy else 0, 2 * p)) for held, stash in memory
    ]

    def costs(rows: list[list[float]]) -> Costs:
        stages: list[StageCost] = []
        for (f, b, w), (held, stash) in zip(rows, memory, strict=True):
            trains = len(stages) >= first
            stages.append(StageCost(f, b * trains, w * trains, held, stash - held, -stash))
        return Costs(tuple(stages), links)

    return costs(times), costs([middle] * p), m, caps, first


def uneven(cases: int) -> dict[str, Any]:
    random = Random(0)
    ratios: dict[Objective, list[float]] = {objective: [] for objective in Objective}
    gaps: list[float] = []
    failures = violations = 0
    for _ in range(cases):
        costs, flat, m, caps, first = uneven_case(random)
        for objective in Objective:
            try:
                spans: list[float] = []
                for given in (costs, flat):
                    schedule = automatic(
                        given, m, caps=caps, first_trainable=first, objective=objective
                    )
                    validate(schedule)
                    timeline = simulate(schedule, costs)
                    violations += any(
                        peak > cap * (1 + 1e-9)
                        for peak, cap in zip(timeline.peak_memory, caps, strict=True)
                    )
                    spans.append(
                        timeline.span if objective is Objective.SPAN else timeline.makespan
                    )
            except DynmoError:
                failures += 1
                continue
            ratios[objective].append(spans[0] / spans[1])
            if objective is Objective.SPAN:
                gaps.append(spans[0] / lower_bound(costs, m, first, objective, caps) - 1)
    own = ratios[Objective.SPAN]
    return {
        "cases": cases,
        "failures": failures,
        "cap_violations": violations,
        "span_shorter_by": 1 - mean(own),
        "makespan_shorter_by": 1 - mean(ratios[Objective.MAKESPAN]),
        "cases_worse_than_median_fed": sum(ratio > 1 + 1e-9 for ratio in own) / len(own),
        "worst_ratio": max(own),
        "best_ratio": min(own),
        "mean_gap_to_bound": mean(gaps),
        "median_gap_to_bound": median(gaps),
    }


def timed_case(p: int, roomy: bool) -> tuple[Costs, list[float]]:
    """Draws the costs and memory limits of a pipeline to be timed."""
    random = Random(p)
    stages = tuple(
        StageCost(
            x := random.uniform(5, 15), x * random.uniform(0.8, 1.2), x * random.uniform(0.5, 1)
        )
        for _ in range(p)
    )
    caps = [
        random.uniform(1.6, 2.4) * p if roomy else random.uniform(0.8, 1.2) * p for _ in range(p)
    ]
    return Costs(stages, tuple(random.uniform(0, 2) for _ in range(p - 1))), caps


def warm(p: int, m: int, runs: int) -> float:
    """Returns the slower of roomy and tight memory, in seconds."""
    worst = 0.0
    for roomy in (True, False):
        costs, caps = timed_case(p, roomy)
        taken = (elapsed(partial(automatic, costs, m, caps=caps)) for _ in range(runs))
        worst = max(worst, min(taken))
    return worst


def new_process(p: int, m: int, cache: str | None = None) -> float:
    """Measures a new process, in seconds from the start of Python to its end."""
    costs, caps = timed_case(p, roomy=False)
    code = "from dynmo.cost.layer_cost import Costs, StageCost\n"
    code += (
        "from dynmo.schedule.automatic.zero_bubble import automatic\n"
        f"automatic({costs!r}, {m}, caps={caps!r})"
    )
    environment = dict(os.environ) | ({"NUMBA_CACHE_DIR": cache} if cache else {})
    command = [sys.executable, "-c", code]
    return elapsed(lambda: subprocess.run(command, check=True, cwd=ROOT, env=environment))


def seconds(runs: int) -> dict[str, Any]:
    warm(2, 2, 1)
    sizes: list[dict[str, Any]] = []
    for (p, m), (warm_aim, cold_aim) in SIZES.items():
        cold = min(new_process(p, m) for _ in range(runs))
        sizes.append(
            {
                "ranks": p,
                "microbatches": m,
                "warm": warm(p, m, runs),
                "warm_aim": warm_aim,
                "cold": cold,
                "cold_aim": cold_aim,
            }
        )
    with tempfile.TemporaryDirectory() as empty:
        return {"sizes": sizes, "first_ever": new_process(24, 96, empty)}


def growth(runs: int) -> dict[str, list[tuple[int, float]]]:
    """Returns the warm seconds by p at m = 128, and by m at p = 16."""
    warm(2, 2, 1)
    return {
        "ranks": [(p, warm(p, 128, runs)) for p in (2, 4, 8, 16, 32, 64, 128)],
        "microbatches": [(m, warm(16, m, runs)) for m in (8, 16, 32, 64, 128, 256, 512, 1024)],
    }


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the milliseconds of a plan by ranks and by microbatches."""
    figure, axes = pyplot().subplots(1, 2, figsize=(WIDTH, 3), sharey=True)
    titles = {"ranks": "ranks (128 microbatches)", "microbatches": "microbatches (16 ranks)"}
    for axis, (name, points) in zip(axes, result["growth"].items(), strict=True):
        axis.loglog([x for x, _ in points], [1000 * y for _, y in points], marker="o")
        axis.set_xscale("log", base=2)
        axis.set_xticks([x for x, _ in points], [str(x) for x, _ in points])
        axis.set_xlabel(titles[name])
    axes[0].set_ylabel("ms to plan, warm")
    return {"planner_growth": figure}


def show(result: dict[str, Any]) -> None:
    console = Console(width=110)
    bubbles = Table("case", "published", "ours", "least", "gap %", "peak / p")
    for row in result["published"]:
        figures = (f"{row[name]:.4f}" for name in ("published", "ours", "least"))
        bubbles.add_row(row["case"], *figures, f"{100 * row['gap']:.3f}", f"{row['peak']:.2f}")
    console.print(bubbles)
    console.print(result["uneven"])
    times = Table("p", "m", "warm s", "aim", "new process s", "aim")
    for size in result["seconds"]["sizes"]:
        fields = [f"{size[name]:.4g}" for name in ("warm", "warm_aim", "cold", "cold_aim")]
        times.add_row(str(size["ranks"]), str(size["microbatches"]), *fields)
    console.print(times)
    console.print(
        f"the very first process, which compiles: {result['seconds']['first_ever']:.3g} s"
    )


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "cases", 2000, "cases of uneven stages")
    add_number(parser, "runs", 5, "timed runs, of which the best counts")

    def measure(options: argparse.Namespace) -> dict[str, Any]:
        return {
            "published": published(),
            "uneven": uneven(options.cases),
            "seconds": seconds(options.runs),
            "growth": growth(options.runs),
        }

    run(parser, measure, show, draw)


if __name__ == "__main__":
    main()
