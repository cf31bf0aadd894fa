"""Experts over the replicas of a stage, live, with layers that sleep.

There are two stages of two replicas.

    python -m benchmarks.expert_parallel [--json]

Four sides of one training, a step of each in turn. All end with the same weights:

    static            experts in equal runs, layers spread evenly
    experts placed    experts move between the two replicas by their load, with one copy each
    layers balanced   layers move between the two stages by their time (`balance.every = "auto"`)
    both

Seconds are medians over the second half of the steps. `perfect` is arithmetic: all sleeps of the
four ranks in a step of `static`, in equal parts. It does not count the pipeline's filling and what
the processors compute. No side can be faster. The times are emulated. The rows, the messages and
the decisions are real. A run's idle ratio counts a wait for rows as work, because it lies within F
and B.
"""

from __future__ import annotations

import math
from argparse import Namespace
from statistics import median
from typing import Any

from benchmarks.expert_parallel_race import REPLICAS, SIDES, STAGES
from benchmarks.harness import run_ranks
from benchmarks.output import main, markdown


def summarize(sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of each side, from the reports of the ranks."""
    half = len(sides["static"]["seconds"]) // 2
    step = {name: median(side["seconds"][half:]) for name, side in sides.items()}
    slept = [math.fsum(ranks) for ranks in sides["static"]["slept"][half:]]
    perfect = median(slept) / STAGES / REPLICAS
    rows = {
        name: {
            "step_seconds": step[name],
            "over_static": step["static"] / step[name],
            "idle_ratio": median(side["idle"][half:]),
            # The largest of the ranks' work over its mean.
            "busiest": median(
                max(ranks) * len(ranks) / math.fsum(ranks) for ranks in side["slept"][half:]
            ),
            "layers": side["layers"],
            "moves": side["moves"],
            "changes": side["changes"],
        }
        for name, side in sides.items()
    }
    return {
        "rows": rows,
        "perfect_over_static": step["static"] / perfect,
        "same_weights": len({side["digest"] for side in sides.values()}) == 1,
    }


def table(result: dict[str, Any]) -> str:
    """Returns the table in Markdown, as docs/reference/results/experts.md shows it."""
    head = ["side", "seconds of a step", "over static", "idle", "busiest rank over the mean"]
    lines: list[list[str]] = []
    for name, row in result["rows"].items():
        seconds, over = f"{row['step_seconds']:.2f}", f"{row['over_static']:.2f}"
        idle, busiest = f"{row['idle_ratio']:.1%}", f"{row['busiest']:.2f}"
        lines.append([name, seconds, over, idle, busiest, " + ".join(map(str, row["layers"]))])
    perfect = f"{result['perfect_over_static']:.2f}"
    lines.append(["perfect (arithmetic)", "", perfect, "", "1.00", ""])
    return markdown([*head, "layers"], lines)


def measure(options: Namespace) -> dict[str, Any]:
    """Runs the four sides on four ranks."""
    sides = run_ranks(
        "benchmarks.expert_parallel_race:race", STAGES * REPLICAS, steps=options.steps
    )
    assert list(sides) == list(SIDES)
    return summarize(sides)


if __name__ == "__main__":
    main((__doc__ or "").partition("\n")[0], measure, [("steps", 20, "of each side")])
