"""How few ranks a model needs while it becomes small.

    python -m benchmarks.repack [--json] [--only PART]

The parts `cases`, `pipetransformer` and `emulated` are in `benchmarks.repack_cases`. The rest is
the part `searched`, in the simulator.

The traces of gradual pruning and of early exit (24 moments of a run) start on 8 ranks. At each
moment a side takes the fewest ranks on which a step takes no longer than the DENSE model's step on
8 ranks. The schedule is ZB-H1 with 16 microbatches of constant size, without link times. Costs are
known at once, and moves are free.

    ours         the best placement of half blocks on each number of ranks, the fewest first
    exhaustive   the fewest ranks for which any placement of half blocks is fast enough
                 (`benchmarks.repack_search`)
    first-fit    the paper's algorithm 4: merges neighbours by memory
    best-fit, round-robin, halving (PipeTransformer)

A baseline merges the ranks of the even placement, for every target. It is given the target that
does best. A rank's memory is what `ROOM` ranks of the dense model hold, by parameters that are not
pruned.

Each number of ranks below ours is searched. A search may replay so many partial placements and no
more. `complete` says whether it ended before. If it did not, `exhaustive` is only the fewest ranks
found.

`proven`: on one rank fewer than ours, no placement under any schedule is fast enough. A rank cannot
begin before the first microbatch has passed the ranks before it. It then has the work of all
microbatches (`least_seconds`, by dynamic programming).

Ranks are means over the moments. `kept` is the least throughput of `ours` over the dense model's on
8 ranks.

The paper has 5.8 of 8 GPUs over gradual pruning, and 4 to 11 % of the speed-up by repacking
(`PAPER`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, product
from statistics import fmean
from typing import Any

from benchmarks import repack_cases
from benchmarks.baselines import merging
from benchmarks.cost_traces import Layers, best, dense, name_of, timeline, trace
from benchmarks.output import (
    WIDTH,
    add_number,
    legend_above,
    markdown,
    parser_of,
    pyplot,
    run,
)
from benchmarks.repack_cases import MICROBATCHES, RANKS, ROUNDED, SHOWN
from benchmarks.repack_search import search_placements
from dynmo.plan.balancers import first_fit
from dynmo.plan.partition import Partition, uniform

ROOM, SEQUENCE = 4, 2048
CASES = ("pruning", "early_exit")
BLOCKS = (24, 32, 40, 48)
PARTS = ("searched", "cases", "pipetransformer", "emulated")
BASELINES = {
    "first-fit": first_fit,
    "best-fit": merging.best_fit,
    "round-robin": merging.round_robin,
    "halving": merging.halving,
}
SIDES = ("ours", "exhaustive", *BASELINES)
PAPER = {
    "case": "pruning",
    "average": 5.8,
    "ranks": RANKS,
    "share": [0.04, 0.11],  # of the speed-up that repacking brings
    "note": (
        "The figures differ because the paper merges whole layers by memory on GPUs, while this "
        "benchmark places half blocks by simulated time, and fewer ranks have less bubble."
    ),
}


def seconds_of(layers: Layers) -> Callable[[Partition], float]:
    """Returns a function from a placement to the seconds of a step with these costs."""
    return cache(lambda partition: timeline(layers, partition, MICROBATCHES).makespan)


def of_baseline(
    name: str,
    layers: Layers,
    seconds: Callable[[Partition], float],
    limit: float,
    room: float,
) -> int:
    """Returns an algorithm's fewest ranks that are fast enough, over all targets."""
    even, memory = uniform(len(layers), RANKS), [float(layer.parameters) for layer in layers]
    merged = {BASELINES[name](even, memory, room, target) for target in range(1, RANKS + 1)}
    fast = (partition.stages for partition in merged if seconds(partition) <= limit)
    return min(fast, default=RANKS)


def least_seconds(layers: Layers, ranks: int) -> float:
    """Returns a lower bound on the step of any placement and schedule, in seconds."""
    before = [0.0, *accumulate(layer.f for layer in layers)]
    work = [0.0, *accumulate(MICROBATCHES * layer.seconds for layer in layers)]
    # Bound by number of layers, on the ranks of the rounds done. Zero ranks hold no layer.
    least = [0.0] + [math.inf] * len(layers)

    def with_rank(stop: int) -> float:
        ends = (max(least[x], before[x] + work[stop] - work[x]) for x in range(stop))
        return min(ends, default=math.inf)

    for _ in range(ranks):
        least = [with_rank(stop) for stop in range(len(layers) + 1)]
    return least[-1]


def search_fewer(layers: Layers, limit: float, ranks: int) -> dict[str, Any]:
    """Searches the fewest ranks that any placement needs, if fewer than `ranks`."""
    complete, replays = True, 0
    for fewer in range(1, ranks):
        search = search_placements(layers, fewer, MICROBATCHES, limit)
        complete, replays = complete and search.complete, replays + search.replays
        if search.placement is not None:
            ranks = fewer
            break
    return {"exhaustive": ranks, "complete": complete, "replays": replays}


@cache
def moment(layers: Layers, limit: float, room: float) -> dict[str, Any]:
    """Compares the sides at one moment."""
    seconds = seconds_of(layers)

    found = (best(layers, ranks, MICROBATCHES) for ranks in range(1, RANKS + 1))
    # If no placement is fast enough, the run stays on all ranks.
    placed = next(x for x in found if x.stages == RANKS or seconds(x) <= limit)
    ranks, taken = placed.stages, seconds(placed)
    baselines = {name: of_baseline(name, layers, seconds, limit, room) for name in BASELINES}
    return {
        "ours": ranks,
        **baselines,
        **search_fewer(layers, limit, ranks),
        "proven": ranks == 1 or least_seconds(layers, ranks - 1) > limit,
        "kept": limit / taken,
    }


def row(
    case: str,
    blocks: int,
    stride: int = 1,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measures one line of the table."""
    whole, moments = dense(blocks, SEQUENCE), trace(case, blocks, SEQUENCE)[::stride]
    limit = ROUNDED * seconds_of(whole)(uniform(2 * blocks, RANKS))
    room = ROOM / RANKS * math.fsum(layer.parameters for layer in whole)
    each: list[dict[str, Any]] = []
    for number, layers in enumerate(moments, 1):
        if progress is not None:
            progress(f"{case}, {blocks} blocks: moment {number} of {len(moments)}")
        each.append(moment(layers, limit, room))
    return {
        "case": case,
        "blocks": blocks,
        "average": {name: fmean(x[name] for x in each) for name in SIDES},
        "ranks": [x["ours"] for x in each],
        "exhaustive": [x["exhaustive"] for x in each],
        "complete": [x["complete"] for x in each],
        "replays": [x["replays"] for x in each],
        "proven": [x["proven"] for x in each],
        "kept": min(x["kept"] for x in each),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown, whose figures docs/reference/results/fewer-ranks.md names."""
    counted = {"proven": "fewer is impossible at", "complete": "searched completely at"}
    head = ["case", "blocks", *SIDES, *counted.values(), "least throughput over dense"]
    lines: list[list[str]] = []
    for x in rows:
        ranks = [f"{x['average'][name]:.1f}" for name in SIDES]
        counts = [f"{sum(x[name])} of {len(x[name])}" for name in counted]
        start = [name_of(x["case"], SEQUENCE), str(x["blocks"])]
        lines.append([*start, *ranks, *counts, f"{x['kept']:.2f}"])
    return markdown(head, lines)


def report(result: dict[str, Any]) -> str:
    """Returns the tables of all parts that were measured, and the paper's figures."""
    texts: list[str] = []
    if "rows" in result:
        paper = result["paper"]
        published = f"The paper: {paper['average']} of {paper['ranks']} GPUs over {paper['case']}."
        texts += [table(result["rows"]), f"{published} {paper['note']}"]
    if "cases" in result:
        texts += [repack_cases.case_table(result["cases"])]
        texts += [repack_cases.rank_table(result["cases"])]
    if "pipetransformer" in result:
        texts += [repack_cases.pipetransformer_table(result["pipetransformer"])]
    if "emulated" in result:
        texts += [repack_cases.emulated_table(result["emulated"])]
    return "\n\n".join(texts)


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws throughput by number of ranks, and ranks over the run, as the paper's figure 4."""
    rows = [x for x in result["cases"] if x["blocks"] == BLOCKS[0]]
    measured = {(x["case"], x["ranks"]): x for x in result.get("emulated", ())}
    figure, panels = pyplot().subplot_mosaic("012;345;6RR", figsize=(WIDTH, 7.2))
    *cases, run_panel = panels.values()
    places = range(len(SHOWN))
    for axes, x in zip(cases, rows, strict=True):
        per_rank, throughput = (
            [x[key][str(n)] for n in SHOWN] for key in ("per_rank", "throughput")
        )
        axes.bar(places, per_rank, 0.6, color="#e69f00", label="per rank")
        axes.plot(places, throughput, marker="s", color="#0072b2", label="throughput")
        known = [i for i in places if (x["case"], SHOWN[i]) in measured]
        if known and x["sequence"] == SEQUENCE:
            values = [measured[x["case"], SHOWN[i]]["throughput"] for i in known]
            axes.plot(known, values, "kx", markersize=7, label="throughput, emulated ranks")
        axes.set_xticks(places, [str(n) for n in SHOWN])
        name = name_of(x["case"], x["sequence"])
        axes.set(title=name, xlabel="ranks", ylim=(0, 1.3 * max(per_rank)))
    for axes in cases[::3]:
        axes.set_ylabel("dense on 8 ranks = 1")
    legend_above(figure, 3)  # of the panels so far
    looks = product(("-", "--", ":", "-."), ("#0072b2", "#e69f00"))
    for i, (x, (line, colour)) in enumerate(zip(rows, looks, strict=False)):
        apart = [ranks + 0.12 * (3 - i) for ranks in x["ranks"]]
        name = name_of(x["case"], x["sequence"])
        look = {"where": "post", "color": colour, "linestyle": line, "label": name}
        run_panel.step(range(len(apart)), apart, **look)
    run_panel.set(
        xlabel="moment of the run (lines drawn apart)",
        title="ranks as fast as dense on 8",
        ylim=(0, 8.8),
    )
    run_panel.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return {"repack": figure}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measures all parts, or the one of `--only`."""
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "searched": lambda: searched(options.blocks),
        "cases": lambda: {
            "cases": repack_cases.cases(options.blocks, show_progress, options.stride)
        },
        "pipetransformer": lambda: {
            "pipetransformer": [
                repack_cases.pipetransformer(blocks, options.stride) for blocks in options.blocks
            ]
        },
        "emulated": lambda: {
            "emulated": repack_cases.emulated(
                options.case or repack_cases.EMULATED, BLOCKS[0], options.steps, options.unit
            )
        },
    }
    result: dict[str, Any] = {}
    for name in (options.only,) if options.only else PARTS:
        result |= parts[name]()
        print(file=sys.stderr)
    return result


def searched(depths: Sequence[int]) -> dict[str, Any]:
    """Compares ours with the search and the baselines at each depth of the model."""
    sizes = [(case, blocks) for case in CASES for blocks in depths]
    rows = [row(case, blocks, progress=show_progress) for case, blocks in sizes]
    return {"rows": rows, "paper": PAPER}


def show_progress(text: str) -> None:
    """Shows a text on one line of stderr."""
    print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    parser.add_argument(
        "--blocks", type=int, nargs="+", choices=BLOCKS, default=BLOCKS, help="depths of the model"
    )
    parser.add_argument("--only", choices=PARTS, help="one of the parts alone")
    add_number(parser, "stride", 1, "of the 24 moments of the cases, every so many-th")
    parser.add_argument(
        "--case",
        choices=repack_cases.EMULATED,
        action="append",
        help="of the emulated runs, this case alone; may be given several times (default all)",
    )
    add_number(parser, "steps", 4, "of an emulated run")
    add_number(parser, "unit", repack_cases.UNIT, "seconds that a dense block's F sleeps")
    run(parser, measure, lambda result: print(report(result)), draw)


if __name__ == "__main__":
    main()
