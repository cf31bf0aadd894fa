"""The dynamic cases end to end: whole training runs on two ranks.

The runs include everything that balancing costs. Each rank has one thread. Sides of a case, all of
one model, data and seed:

    dense        without the technique, uniform
    uniform      the technique, layers spread evenly for good: what it brings by itself
    parameters   the technique, spread once by parameters as DeepSpeed does (left out where that
                 is the uniform placement)
    mask         pruning alone: weights are zeroed under a mask and the work stays dense, as in
                 frameworks that prune by mask
    dynmo        the technique, starting uniform, balanced by measured time when the work has
                 changed (`balance.every = "auto"`)

Each side is the trainer's own loop: the case acts, layers are profiled, the balancer decides,
layers move, a step trains. The sides take turns, one step each, so that all meet the same machine.
The order turns with the step. Seconds are of a whole turn of the loop, from barrier to barrier. The
planner's loops are compiled before. `same_weights` says whether the sides with the technique end
with the same weights to the last bit. The side `mask` is left out, because its sums run in another
order.

`ideal` comes from the simulator and the layer costs measured in the same run, without links. It is
the uniform placement's time over the best placement's, phase by phase, had that been known at once.
A phase lasts until the technique changes the model again. `ideal_as_placed` takes the placements as
they were, step by step. The difference is what deciding late costs.
`share_of_ideal` = (speedup - 1) / (ideal - 1). It is not given where the ideal is under 1.03.

`same_work_takes` compares the layers' seconds in the balanced run with those in the uniform one, in
the last phase. The work is the same, but the cores no longer idle. They share caches, memory and,
on some machines, their arithmetic. The simulator knows nothing of that. Overhead is what the run's
own account (the `end` event) says.

Aims, written before measuring: 95 % of the ideal in the last phase; overhead under 1 % of the run.
A round of all cases takes about half an hour.

The dense side of early exit has the same exit heads, but tokens exit in the last step only. Its
work drifts while the model learns, so its phases are shorter than from change to change. Mixture of
depths routes every second of 6 blocks, and has one phase. The ranks have 1 and 2 routed blocks.
Every second of 6 blocks has 8 experts, 2 of which compute a token. Its dense side is the model
without experts, which computes each token once. Each rank has all experts of its layers, so the
load of the experts does not change the work of a layer.

The paper's figures have other baselines (`benchmarks.published`). The second table shows each
beside the speed-up over the side that is nearest to its baseline.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks.cases_race import (
    CASES,
    MICROBATCHES,
    RANKS,
    SCHEDULE,
    TECHNIQUE,
    phases,
    published_case,
)
from benchmarks.cost_traces import best, timeline
from benchmarks.harness import run_ranks
from benchmarks.output import (
    HATCHES,
    WIDTH,
    add_number,
    legend_above,
    markdown,
    parser_of,
    pyplot,
    run,
)
from benchmarks.published import PUBLISHED
from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.partition import Partition, uniform

LEAST_IDEAL = 1.03
COMPARED = ("uniform", "dynmo")  # the sides that are held against the simulator

Side = dict[str, Any]
"""What one side did in one round (`cases_race.account`)."""
Round = dict[str, Side]
"""The sides of one round by name."""


def settled(phase: tuple[int, int]) -> slice:
    """Returns the second half of a phase: measured, decided, moved."""
    return slice((phase[0] + phase[1]) // 2, phase[1])


def middle_costs(accounts: Sequence[Side]) -> list[tuple[LayerCost, ...]]:
    """Returns the layers' costs of each phase.

    Each figure is its median over the accounts.
    """
    medians: list[tuple[LayerCost, ...]] = []
    for phase in zip(*(x["costs"] for x in accounts), strict=True):
        layers = zip(*phase, strict=True)
        medians.append(
            tuple(
                LayerCost(*(median(figure) for figure in zip(*layer, strict=True)))
                for layer in layers
            )
        )
    return medians


def work(account: Side) -> float:
    """Returns the seconds of all layers' F, B and W in the last phase.

    They are for one microbatch.
    """
    return math.fsum(seconds for layer in account["costs"][-1] for seconds in layer)


def simulated(
    spans: Sequence[tuple[int, int]],
    costs: Sequence[tuple[LayerCost, ...]],
    partitions: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Simulates each phase under three placements."""
    out: dict[str, list[float]] = {"uniform": [], "best": [], "as_placed": []}
    for (start, stop), layers in zip(spans, costs, strict=True):
        even = uniform(len(layers), len(partitions[0]))

        def seconds(partition: Partition, layers: tuple[LayerCost, ...] = layers) -> float:
            return timeline(layers, partition, MICROBATCHES, SCHEDULE).makespan

        out["uniform"].append((stop - start) * seconds(even))
        out["best"].append(
            (stop - start) * seconds(best(layers, even.stages, MICROBATCHES, even, SCHEDULE))
        )
        as_placed = [Partition(tuple(counts)) for counts in partitions[start:stop]]
        known = {partition: seconds(partition) for partition in set(as_placed)}
        out["as_placed"].append(math.fsum(known[partition] for partition in as_placed))
    return out


def share(speedup: float, ideal: float) -> float | None:
    """Returns the part of the ideal gain that is reached. None if the ideal is too small."""
    return (speedup - 1) / (ideal - 1) if ideal >= LEAST_IDEAL else None


def total(side: Side, steps: slice = slice(None)) -> float:
    """Returns the seconds of some steps of a run, by default all."""
    return math.fsum(side["seconds"][steps])


def speedups(rounds: Sequence[Round], last: slice) -> dict[str, dict[str, float]]:
    """Returns the speed-ups of `dynmo` over each other side."""
    return {
        name: {
            "run": median(total(r[name]) / total(r["dynmo"]) for r in rounds),
            "last_phase": median(
                median(r[name]["seconds"][last]) / median(r["dynmo"]["seconds"][last])
                for r in rounds
            ),
        }
        for name in rounds[0]
        if name != "dynmo"
    }


def speedups_by_phase(
    rounds: Sequence[Round], spans: Sequence[tuple[int, int]], model: dict[str, list[float]]
) -> list[dict[str, Any]]:
    """Returns the speed-ups of `dynmo` over `uniform` in each phase, beside the simulator's."""
    return [
        {
            "steps": [start, stop],
            "speedup": median(
                total(r["uniform"], slice(start, stop)) / total(r["dynmo"], slice(start, stop))
                for r in rounds
            ),
            "ideal": even / known_at_once,
            "ideal_as_placed": even / as_placed,
        }
        for (start, stop), even, known_at_once, as_placed in zip(
            spans, model["uniform"], model["best"], model["as_placed"], strict=True
        )
    ]


def late(rounds: Sequence[Round], name: str, key: str, last: slice) -> float:
    """Returns the median of a figure of each step, in the last phase of a side."""
    return median(median(r[name][key][last]) for r in rounds)


def over_simulated(
    rounds: Sequence[Round], last: slice, length: int, simulated: dict[str, float]
) -> dict[str, dict[str, float]]:
    """Compares the last phase of `uniform` and `dynmo` with the simulator."""
    step, program = (
        {name: late(rounds, name, key, last) for name in COMPARED} for key in ("seconds", "program")
    )
    return {
        "measured_over_simulated": {n: step[n] * length / simulated[n] for n in COMPARED},
        # The simulator knows only the step's program. The rest is the step's end and the loop's
        # turn.
        "program_over_simulated": {n: program[n] * length / simulated[n] for n in COMPARED},
        "program_share": {n: program[n] / step[n] for n in COMPARED},
        # The costs are medians, so they know nothing of an op that was held up.
        "ops_over_costs": {
            n: median(median(r[n]["ops"][last]) / (MICROBATCHES * work(r[n])) for r in rounds)
            for n in COMPARED
        },
    }


def same_weights(rounds: Sequence[Round]) -> bool:
    """Says whether all sides of `TECHNIQUE` end with the same weights, and each in all rounds."""
    digests = {name: {r[name]["digest"] for r in rounds} for name in rounds[0]}
    technique = set[str]().union(*(digests[name] for name in TECHNIQUE if name in digests))
    return len(technique) == 1 and all(len(each) == 1 for each in digests.values())


def summarize(case: str, rounds: Sequence[Round]) -> dict[str, Any]:
    """Returns the row of a case: medians over the rounds, and the simulator's figures."""
    first = rounds[0]
    spans = phases(first["dynmo"]["changes"], len(first["dynmo"]["seconds"]))
    last = settled(spans[-1])
    costs = middle_costs([r[name] for r in rounds for name in COMPARED])
    model = simulated(spans, costs, first["dynmo"]["layers"])
    over = speedups(rounds, last)
    ideal = {
        "run": sum(model["uniform"]) / sum(model["best"]),
        "last_phase": model["uniform"][-1] / model["best"][-1],
    }
    seconds = {name: median(total(r[name]) for r in rounds) for name in first}
    overhead = {
        key: median(r["dynmo"]["overhead"][key] for r in rounds)
        for key in ("measure", "decide", "move")
    }
    length = spans[-1][1] - spans[-1][0]
    last_simulated = {"uniform": model["uniform"][-1], "dynmo": model["as_placed"][-1]}
    ends = {name: Partition(tuple(first[name]["layers"][-1])) for name in COMPARED}
    timings = {name: timeline(costs[-1], x, MICROBATCHES, SCHEDULE) for name, x in ends.items()}
    return {
        "case": case,
        "steps": len(first["dynmo"]["seconds"]),
        "phases": [[start, stop] for start, stop in spans],
        "what": first["dynmo"]["what"],
        "seconds": seconds,
        "last_phase_step_seconds": {n: late(rounds, n, "seconds", last) for n in first},
        "speedup_over": over,
        # Of the whole run, over `uniform`.
        "speedup_over_by_round": [total(r["uniform"]) / total(r["dynmo"]) for r in rounds],
        "ideal": ideal,
        "ideal_as_placed": sum(model["uniform"]) / sum(model["as_placed"]),
        "by_phase": speedups_by_phase(rounds, spans, model),
        "share_of_ideal": {key: share(over["uniform"][key], ideal[key]) for key in ideal},
        **over_simulated(rounds, last, length, last_simulated),
        "same_work_takes": median(work(r["dynmo"]) / work(r["uniform"]) for r in rounds),
        "idle_ratio": {n: late(rounds, n, "idle", last) for n in COMPARED},
        "simulated_idle_ratio": {name: x.idle_ratio for name, x in timings.items()},
        "simulated_bubble_ratio": {name: x.bubble_ratio for name, x in timings.items()},
        "overhead": overhead | {"share_of_run": sum(overhead.values()) / seconds["dynmo"]},
        "layers": {name: first[name]["layers"][-1] for name in first},
        "tokens": first["dynmo"]["tokens"],
        "moves": [r["dynmo"]["moves"] for r in rounds],
        "same_weights": same_weights(rounds),
        "costs": [[[x.f, x.b, x.w] for x in layers] for layers in costs],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the first table in Markdown, as docs/reference/results/runs.md shows it.

    Each cell has the whole run / the last phase.
    """
    head = [
        "case",
        "over dense",
        "over mask",
        "over parameters",
        "over uniform",
        "ideal",
        "share of ideal",
        "idle",
        "overhead",
    ]
    lines: list[list[str]] = []
    for row in rows:

        def over(name: str, row: dict[str, Any] = row) -> str:
            speedup = row["speedup_over"].get(name)
            return both(speedup, "{:.2f}") if speedup else "uniform" if name == "parameters" else ""

        idle = row["idle_ratio"]
        lines.append(
            [
                row["case"].replace("_", " "),
                *(over(name) for name in ("dense", "mask", "parameters", "uniform")),
                both(row["ideal"], "{:.2f}"),
                both(row["share_of_ideal"], "{:.0%}"),
                f"{idle['uniform']:.0%} to {idle['dynmo']:.0%}",
                f"{row['overhead']['share_of_run']:.1%}",
            ]
        )
    return markdown(head, lines)


def published_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows beside the paper's figures, in Markdown."""
    head = ["case", "ours", "over our side", "the paper's", "over", "on"]
    lines: list[list[str]] = []
    for row in rows:
        published = PUBLISHED[published_case(row["case"])]
        side = "dense" if published.over_dense else best_static(row)
        ours = both(row["speedup_over"][side], "{:.2f}")
        case = row["case"].replace("_", " ")
        theirs = [published.speedup, published.baseline, published.setup]
        lines.append([case, ours, side, *theirs])
    return markdown(head, lines, "lrlrll")


PARTS = {"measure": "profiling", "decide": "algorithm", "move": "migration"}


def overhead_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the costs of balancing by part in Markdown, in ms and in shares of the run."""
    head = ["case", *(f"{name}, ms" for name in PARTS.values()), *PARTS.values(), "together"]
    lines: list[list[str]] = []
    for row in rows:
        seconds = [row["overhead"][part] for part in PARTS]
        shares = [*(x / row["seconds"]["dynmo"] for x in seconds), row["overhead"]["share_of_run"]]
        case = row["case"].replace("_", " ")
        figures = [*(f"{1000 * x:.0f}" for x in seconds), *(f"{x:.2%}" for x in shares)]
        lines.append([case, *figures])
    return markdown(head, lines)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the costs of balancing by part, as the right of the paper's figure 4."""
    rows = result["rows"]
    figure, axes = pyplot().subplots(figsize=(WIDTH, 3.2))
    below = [0.0] * len(rows)
    looks = zip(("#56b4e9", "#0072b2", "#d55e00"), HATCHES, strict=False)
    for (part, name), (colour, hatch) in zip(PARTS.items(), looks, strict=True):
        shares = [100 * row["overhead"][part] / row["seconds"]["dynmo"] for row in rows]
        look = {"color": colour, "hatch": hatch, "edgecolor": "white"}
        axes.bar(range(len(rows)), shares, 0.6, bottom=below, label=name, **look)
        below = [a + b for a, b in zip(below, shares, strict=True)]
    axes.set_xticks(
        range(len(rows)), [row["case"].replace("_", "\n", 1).replace("_", " ") for row in rows]
    )
    axes.set_ylabel("% of the run")
    legend_above(figure, len(PARTS))
    return {"overhead": figure}


def best_static(row: dict[str, Any]) -> str:
    """Returns the faster of the sides with the technique whose layers never move."""
    speedups = row["speedup_over"]
    return min(
        (name for name in ("uniform", "parameters") if name in speedups),
        key=lambda name: speedups[name]["run"],
    )


def both(values: dict[str, float | None], form: str) -> str:
    """Formats the figures of the whole run and of the last phase."""
    return " / ".join(
        "-" if values[key] is None else form.format(values[key]) for key in ("run", "last_phase")
    )


def measure(cases: Sequence[str], steps: int, rounds: int) -> dict[str, Any]:
    """Measures the cases, and prints the line of each as it ends."""
    rows: list[dict[str, Any]] = []
    for case in track(cases, "cases", console=Console(stderr=True)):
        given: dict[str, Any] = {"case": case, "steps": steps, "rounds": rounds}
        rows.append(summarize(case, run_ranks("benchmarks.cases_race:race", RANKS, **given)))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr)
    return {"rows": rows}


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    parser.add_argument(
        "--case",
        choices=CASES,
        action="append",
        help="this case alone; may be given several times (default all)",
    )
    add_number(parser, "pairs", 3, "rounds, each a whole run of every side")
    add_number(parser, "steps", 80, "of a run, 20 or more")
    parser.add_argument(
        "--quick", action="store_true", help="one round of 40 steps: to see that it works"
    )

    def measured(options: argparse.Namespace) -> dict[str, Any]:
        if options.steps < 20:
            parser.error(
                "--steps: the techniques need 20 steps to act and be answered; give 20 or more"
            )
        steps, rounds = (40, 1) if options.quick else (options.steps, options.pairs)
        return measure(options.case or CASES, steps, rounds)

    run(
        parser,
        measured,
        lambda x: print(
            table(x["rows"]),
            published_table(x["rows"]),
            overhead_table(x["rows"]),
            sep="\n\n",
        ),
        draw,
    )


if __name__ == "__main__":
    main()
