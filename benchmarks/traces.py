"""Fixed cost traces of three cases under every balancer, in the simulator.

The cases are pruning, freezing and sparse attention. The schedule is ZB-H1 with twice as many
microbatches as ranks and no link times. Each trace (benchmarks/data/traces: models of cost, per
half block, 24 moments) is timed as

dense                 without the technique, as many whole blocks on every rank as on any other
uniform               with the technique, placed the same: what a run has that does not balance
parameters, static    whole blocks, by parameters, once
partition, diffusion  whole blocks, by parameters that train or by time, anew at every moment:
                      DynMo's four, at their best (`exact` places, path diffusion moves; both at
                      once and for nothing)
ours                  halves of blocks, placed by `exact`, as a run decides: every 5 steps of 50 a
                      moment, from the costs of the step before, where it gains 2 % at least
optimum               of whole blocks, of halves: the least time found for a moment's costs, known
                      at once (`share_of_least_bottleneck` is against a proven optimum: the least
                      bottleneck that any placement has, without the pipeline's filling)
perfect               every rank has the same part of all work, as if layers could be cut anywhere

`gain` is the uniform placement's time over another's. Placing whole blocks cannot gain more than
`bound` = ceil(blocks / ranks). Speed-ups over dense contain what the technique itself saves.
`published` are the paper's (figure 3).

The microbatches are twice the ranks, which is enough for the longest warm-up (2p - 1, ZB-H2) and
takes half as long to simulate as the paper's four times. `--only growth` places every case with
both numbers, on 8 to 24 ranks: `benchmarks.traces_growth`.

Early exit and mixture of depths have a table of their own, because their costs differ at every
step: `benchmarks.traces_stepwise`. `--only moves` moves layers at each of these steps, between
steps and ahead: `benchmarks.traces_moves`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from benchmarks import traces_growth, traces_moves, traces_stepwise
from benchmarks.cost_traces import (
    CASES,
    Layers,
    best,
    bottleneck,
    dense,
    in_blocks,
    in_halves,
    name_of,
    perfect,
    timeline,
    trace,
)
from benchmarks.harness import run_ranks
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
from benchmarks.published import IDLE, PUBLISHED
from benchmarks.traces_emulated import emulated_table
from dynmo.plan.balancers import diffuse
from dynmo.plan.bisection import exact
from dynmo.plan.partition import Cost, Partition, uniform, weigh
from dynmo.plan.replay import replay
from dynmo.plan.workload import LayerSection, Moment, Policy, Workload

BLOCKS = (24, 32, 40, 48)
RANKS = (16, 24)
EVERY, STEPS = 5, 50  # a decision, a moment


def static(cost: Cost, moments: Sequence[Layers], ranks: int) -> list[Partition]:
    """Places the layers once, at the first moment."""
    return [exact(weigh(moments[0], cost), ranks)] * len(moments)


def partitioned(cost: Cost, moments: Sequence[Layers], ranks: int) -> list[Partition]:
    """Partitions the layers anew at every moment."""
    out = [uniform(len(moments[0]), ranks)]
    for layers in moments:
        out.append(exact(weigh(layers, cost), ranks, current=out[-1]))
    return out[1:]


def diffused(cost: Cost, moments: Sequence[Layers], ranks: int) -> list[Partition]:
    """Lets the layers diffuse at every moment, from the placement before."""
    out = [uniform(len(moments[0]), ranks)]
    for layers in moments:
        out.append(diffuse(weigh(layers, cost), out[-1])[-1])
    return out[1:]


Placer = Callable[[Sequence[Layers], int], list[Partition]]
BASELINES: dict[str, Placer] = {
    "parameters, static": partial(static, "parameters"),
    "partition, parameters": partial(partitioned, "parameters"),
    "diffusion, parameters": partial(diffused, "parameters"),
    "partition, time": partial(partitioned, "time"),
    "diffusion, time": partial(diffused, "time"),
}


def ours(
    case: str, moments: Sequence[Layers], ranks: int, microbatches: int, start: Partition
) -> tuple[float, float, int]:
    """Replays a run's own decisions.

    Returns:
        The mean seconds and the mean bottleneck of a step, and how often layers moved.
    """
    workload = Workload(
        name=case,
        steps=STEPS * len(moments),
        ranks=ranks,
        microbatches=microbatches,
        layers=LayerSection(moments=[Moment.of(STEPS * i, x) for i, x in enumerate(moments)]),
        policy=Policy(every=EVERY, initial=start.counts),
    )
    outcome = replay(workload)
    loads = [
        bottleneck(moments[i // STEPS], Partition(counts))
        for i, counts in enumerate(outcome.partitions)
    ]
    return (
        math.fsum(x.seconds for x in outcome.policy) / workload.steps,
        math.fsum(loads) / len(loads),
        len(outcome.moves),
    )


def row(case: str, sequence: int, blocks: int, ranks: int, stride: int = 1) -> dict[str, Any]:
    """Measures one line of the table."""
    halves, microbatches = trace(case, blocks, sequence)[::stride], 2 * ranks
    wholes = [in_blocks(layers) for layers in halves]
    even = uniform(blocks, ranks)

    @cache
    def seconds(moment: int, placement: Partition) -> float:
        layers = halves if placement.layers == 2 * blocks else wholes
        return timeline(layers[moment], placement, microbatches).makespan

    def mean(placements: Sequence[Partition]) -> float:
        return math.fsum(seconds(i, x) for i, x in enumerate(placements)) / len(placements)

    times = {
        "dense": timeline(in_blocks(dense(blocks, sequence)), even, microbatches).makespan,
        "uniform": mean([even] * len(halves)),
    }
    times |= {name: mean(place(wholes, ranks)) for name, place in BASELINES.items()}
    times["ours"], load, moves = ours(case, halves, ranks, microbatches, in_halves(even))
    times["optimum of blocks"] = mean(
        [best(layers, ranks, microbatches, even) for layers in wholes]
    )
    times["optimum of halves"] = mean(
        [best(layers, ranks, microbatches, in_halves(even)) for layers in halves]
    )
    times["perfect"] = math.fsum(
        perfect(layers, ranks, microbatches).makespan for layers in halves
    ) / len(halves)
    least = math.fsum(
        bottleneck(x, exact([layer.seconds for layer in x], ranks)) for x in halves
    ) / len(halves)
    return {
        "case": case,
        "sequence": sequence,
        "blocks": blocks,
        "ranks": ranks,
        "microbatches": microbatches,
        "seconds": times,
        "gain": {name: times["uniform"] / x for name, x in times.items()},
        "over_dense": {name: times["dense"] / x for name, x in times.items()},
        "share_of_optimum": times["optimum of halves"] / times["ours"],
        "bound": -(-blocks // ranks),
        "least_of_halves": microbatches * least,
        "share_of_least_bottleneck": least / load,
        "moves": moves,
        "published": PUBLISHED[case].speedup,
    }


# -- idleness --------------------------------------------------------------------------------------


def idleness(blocks: int, ranks: int) -> dict[str, Any]:
    """Returns the share of a step in which a rank does not work.

    The shares are means over moments and ranks: placed evenly, balanced by halves, and of the
    dense model. Moments with nothing of the technique yet count as any other.
    """
    microbatches = 2 * ranks
    even = uniform(blocks, ranks)

    def mean(moments: Sequence[Layers], placements: Sequence[Partition]) -> float:
        return math.fsum(
            timeline(x, p, microbatches).idle_ratio
            for x, p in zip(moments, placements, strict=True)
        ) / len(moments)

    full = dense(blocks, 2048)
    out: dict[str, Any] = {
        "blocks": blocks,
        "ranks": ranks,
        "dense": {
            "static": mean([full], [in_halves(even)]),
            "balanced": mean([full], [best(full, ranks, microbatches)]),
        },
    }
    for case, sequence in CASES:
        moments = trace(case, blocks, sequence)
        out[name_of(case, sequence)] = {
            "static": mean(moments, [in_halves(even)] * len(moments)),
            "static_at_worst": max(
                timeline(x, in_halves(even), microbatches).idle_ratio for x in moments
            ),
            "balanced": mean(
                moments, [best(x, ranks, microbatches, in_halves(even)) for x in moments]
            ),
        }
    return out


def with_stepwise(
    rows: Sequence[dict[str, Any]], stepwise: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Adds the cases whose costs differ at every step to the idleness."""
    return [
        row
        | {
            name_of(x["case"], traces_stepwise.SEQUENCE): x["idle"]
            for x in stepwise
            if (x["blocks"], x["ranks"]) == (row["blocks"], row["ranks"])
        }
        for row in rows
    ]


def _drawn(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Draws the idleness by depth: a panel for each case."""
    plt = pyplot()
    names = [key for key in rows[0] if isinstance(rows[0][key], dict)]
    height = -(-len(names) // 3)
    figure, axes = plt.subplots(
        height, 3, figsize=(WIDTH, 0.6 + 2.1 * height), sharey=True, squeeze=False
    )
    for panel in axes.flat[len(names) :]:
        panel.axis("off")
    for panel, name in zip(axes.flat, names, strict=False):
        sides = {
            key: (colour, [100 * row[name][key] for row in rows])
            for key, colour in (("static", "#d55e00"), ("balanced", "#0072b2"))
        }
        bars(panel, [str(row["blocks"]) for row in rows], sides)
        for drawn in panel.containers:
            panel.bar_label(drawn, fmt="%.0f")
        ranks = rows[0][name].get("ranks")
        panel.set_title(name if ranks is None else f"{name}, {ranks} ranks")
        if name in IDLE:
            panel.axhline(100 * IDLE[name], color="black", ls="--", lw=1, label="paper, static")
        panel.margins(y=0.15)
    figure.supxlabel("blocks", fontsize="medium")
    figure.supylabel(f"idle on {rows[0]['ranks']} ranks, % of a step", fontsize="medium")
    legend_above(figure, 3)
    return {"idleness": figure}


def with_experts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the idleness of the traces of experts, which `benchmarks.experts` has measured."""
    idle = {
        x["blocks"]: {key: x["sides"][side]["idle"]["zb-h1"] for key, side in _OF_EXPERTS.items()}
        | {"ranks": x["stages"]}
        for x in json.loads(EXPERTS.read_text())["traces"]
    }
    return [row | {"experts": idle[row["blocks"]]} for row in rows if row["blocks"] in idle]


EXPERTS = Path(__file__).parent / "results" / "experts.json"
_OF_EXPERTS = {"static": "static", "balanced": "layers balanced"}


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the idleness, if it is known."""
    if "idleness" not in result:
        return {}
    return _drawn(with_experts(with_stepwise(result["idleness"], result.get("stepwise", ()))))


# -- output ----------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    """Prints the tables, and the figures that they lack."""
    print(*tables(result), sep="\n\n", end="\n\n")
    shown = ("rows", "stepwise", "growth", "moves")
    others = {key: value for key, value in result.items() if key not in shown}
    print(json.dumps(others, indent=1))


def tables(result: dict[str, Any]) -> list[str]:
    """Returns the tables of all parts that were measured."""
    texts: list[str] = []
    if "emulated" in result:
        texts.append(emulated_table(result["emulated"]))
    if "rows" in result:
        texts += [table(result["rows"]), summary(result["rows"])]
    if "stepwise" in result:
        texts.append(traces_stepwise.table(result["stepwise"]))
    if "moves" in result:
        texts.append(traces_moves.table(result["moves"]))
    if "growth" in result:
        texts += [
            traces_growth.table(result["growth"]),
            traces_growth.microbatch_table(result["growth"]),
        ]
    return texts


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    names = [*BASELINES, "ours", "optimum of blocks", "optimum of halves", "perfect"]
    head = [
        "case",
        "blocks",
        "ranks",
        *names,
        "ours / optimum",
        "bound",
        "uniform over dense",
        "ours over dense",
        "published",
    ]
    lines: list[list[str]] = []
    for x in rows:
        numbers = [f"{x['gain'][name]:.2f}" for name in names]
        over = [f"{x['over_dense'][name]:.2f}" for name in ("uniform", "ours")]
        share = f"{100 * x['share_of_optimum']:.1f} %"
        start = [name_of(x["case"], x["sequence"]), str(x["blocks"]), str(x["ranks"])]
        lines.append([*start, *numbers, share, str(x["bound"]), *over, x["published"]])
    return markdown(head, lines)


def summary(rows: Sequence[dict[str, Any]], ranks: int = 24) -> str:
    """Returns the short table of docs/reference/results/traces.md.

    It has the best of the static placements and of the paper's dynamic ones beside ours.
    """
    head = [
        "24 ranks",
        "blocks",
        "static",
        "DynMo's four",
        "ours",
        "optimum",
        "perfect",
        "bound",
        "ours over dense",
        "the paper's",
    ]
    lines: list[list[str]] = []
    for x in (row for row in rows if row["ranks"] == ranks):
        gain = x["gain"]
        best_static = max(gain["uniform"], gain["parameters, static"])
        best_dynamic = max(gain[name] for name in BASELINES if not name.endswith("static"))
        numbers = (
            best_static,
            best_dynamic,
            gain["ours"],
            gain["optimum of halves"],
            gain["perfect"],
        )
        start = [name_of(x["case"], x["sequence"]), str(x["blocks"])]
        lines.append(
            [
                *start,
                *(f"{n:.2f}" for n in numbers),
                str(x["bound"]),
                f"{x['over_dense']['ours']:.2f}",
                x["published"],
            ]
        )
    return markdown(head, lines)


def emulated(options: argparse.Namespace) -> dict[str, Any]:
    # At 2k tokens sparse attention leaves next to nothing to balance.
    cases = [case for case in CASES[: options.cases] if case != ("sparse_attention", 2048)]
    given = {"cases": cases, "pairs": options.pairs, "steps": 2}
    return {
        "emulated": [
            row
            for ranks in options.ranks
            for row in run_ranks("benchmarks.traces_emulated:emulate", ranks, **given)
        ]
    }


def moves(steps: int) -> list[dict[str, Any]]:
    return run_ranks("benchmarks.traces_moves:moves", traces_moves.RANKS, steps=steps)


def simulated(options: argparse.Namespace) -> dict[str, Any]:
    cases = CASES[: options.cases]
    rows = [
        row(case, sequence, blocks, ranks)
        for case, sequence in cases
        for blocks in options.blocks
        for ranks in RANKS
    ]
    by_time = [max(x["gain"]["partition, time"], x["gain"]["diffusion, time"]) for x in rows]
    by_parameters = [
        max(x["gain"]["partition, parameters"], x["gain"]["diffusion, parameters"]) for x in rows
    ]
    return {
        "rows": rows,
        "least_share_of_optimum": min(x["share_of_optimum"] for x in rows),
        "time_beats_parameters": {
            "better": sum(a > b * (1 + 1e-9) for a, b in zip(by_time, by_parameters, strict=True)),
            "worse": sum(a < b * (1 - 1e-9) for a, b in zip(by_time, by_parameters, strict=True)),
            "of": len(rows),
        },
        "idleness": [idleness(blocks, 24) for blocks in options.blocks],
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all parts, or the one of `--only`."""
    parts = {
        "simulated": lambda: simulated(options),
        "stepwise": lambda: traces_stepwise.stepwise(options.blocks, RANKS),
        "growth": lambda: traces_growth.growth(options.blocks, options.cases, options.stride),
        "emulated": lambda: emulated(options),
        "moves": lambda: {"moves": moves(options.steps)},
    }
    result: dict[str, Any] = {}
    for name in (options.only,) if options.only else parts:
        result |= parts[name]()
    return result


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    parser.add_argument(
        "--blocks", type=int, nargs="+", choices=BLOCKS, default=BLOCKS, help="depths of the model"
    )
    add_number(parser, "cases", len(traces_growth.ALL_CASES), "so many of the cases")
    add_number(parser, "stride", traces_growth.STRIDE, "of growth: every so many-th moment")
    parser.add_argument(
        "--only",
        choices=("simulated", "stepwise", "growth", "emulated", "moves"),
        help=(
            "one part: the simulator, the simulator step by step, the gain by ranks and blocks, "
            "48 blocks on real ranks that sleep, or moves between and during steps"
        ),
    )
    parser.add_argument(
        "--ranks", type=int, nargs="+", choices=RANKS, default=RANKS, help="of the emulated runs"
    )
    add_number(parser, "pairs", 3, "of the emulated runs: how often each placement takes its turn")
    add_number(parser, "steps", 6, "of the moves: steps of each trace")
    run(parser, measure, show, draw)


if __name__ == "__main__":
    main()
