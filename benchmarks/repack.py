"""How few ranks a model needs while it becomes small, in the simulator.

    python -m benchmarks.repack [--json]

The traces of gradual pruning and of early exit (24 moments of a run) start on 8 ranks. At each
moment a side takes the fewest ranks on which a step takes no longer than the DENSE model's step on
8 ranks. The schedule is ZB-H1 with 16 microbatches of constant size, without link times. Costs are
known at once, and moves are free.

    ours         the best placement of half blocks on each number of ranks (`fewest_ranks`)
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

Ranks, speed-ups and gains are means over the moments. Speed-ups and gains compare with the even
placement on 8 ranks at the same moment. A gain is throughput per rank:

    speedup         the best placement on 8 ranks, so without repacking
    repacked        speed-up of `ours`
    repacked_gain   gain of `ours`, which is `repacked` times 8 over its ranks
    kept            least throughput of `ours` over the dense model's on 8 ranks
    throughput      on 8, 6, 4 and 2 ranks at the last moment, over the dense model's on 8 ranks
    per_rank        the same for throughput per rank

The paper's figure 4 has 5.8 of 8 GPUs over gradual pruning (`PAPER`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.baselines import merging
from benchmarks.cost_traces import Layers, best, dense, name_of, timeline, trace
from benchmarks.output import markdown, parser_of, pyplot, run, save_picture
from benchmarks.repack_search import search_placements
from dynmo.balance.partition import Partition, uniform
from dynmo.balance.repack import fewest_ranks

RANKS, MICROBATCHES, ROOM, SEQUENCE = 8, 16, 4, 2048
CASES = ("pruning", "early_exit")
BLOCKS = (24, 32, 40, 48)
SHOWN = (8, 6, 4, 2)
ROUNDED = 1.00001  # the traces have five digits
BASELINES = {
    "first-fit": merging.first_fit,
    "best-fit": merging.best_fit,
    "round-robin": merging.round_robin,
    "halving": merging.halving,
}
SIDES = ("ours", "exhaustive", *BASELINES)
PAPER = {
    "case": "pruning",
    "average": 5.8,
    "ranks": RANKS,
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

    def place(ranks: int) -> Partition | None:
        return best(layers, ranks, MICROBATCHES)

    choice = fewest_ranks(place, seconds, limit, RANKS)
    even = seconds(uniform(len(layers), RANKS))
    balanced = seconds(best(layers, RANKS, MICROBATCHES))
    ranks, taken = RANKS, balanced  # if no placement is fast enough, the run stays on all ranks
    if choice is not None:
        ranks, taken = choice.partition.stages, choice.seconds
    baselines = {name: of_baseline(name, layers, seconds, limit, room) for name in BASELINES}
    return {
        "ours": ranks,
        **baselines,
        **search_fewer(layers, limit, ranks),
        "proven": ranks == 1 or least_seconds(layers, ranks - 1) > limit,
        "speedup": even / balanced,
        "repacked": even / taken,
        "repacked_gain": even / taken * RANKS / ranks,
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
    last = moments[-1]
    seconds = {ranks: seconds_of(last)(best(last, ranks, MICROBATCHES)) for ranks in SHOWN}
    means = (*SIDES, "speedup", "repacked", "repacked_gain")
    mean = {name: fmean(x[name] for x in each) for name in means}
    return {
        "case": case,
        "blocks": blocks,
        "average": {name: mean[name] for name in SIDES},
        "ranks": [x["ours"] for x in each],
        "exhaustive": [x["exhaustive"] for x in each],
        "complete": [x["complete"] for x in each],
        "replays": [x["replays"] for x in each],
        "proven": [x["proven"] for x in each],
        "speedup": mean["speedup"],
        "repacked": mean["repacked"],
        "repacked_gain": mean["repacked_gain"],
        "kept": min(x["kept"] for x in each),
        "throughput": {str(ranks): limit / taken for ranks, taken in seconds.items()},
        "per_rank": {str(ranks): RANKS / ranks * limit / taken for ranks, taken in seconds.items()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown, whose figures docs/planning.md names."""
    counted = {"proven": "fewer is impossible at", "complete": "searched completely at"}
    shown = {"kept": "least throughput over dense", "speedup": "speed-up on 8 ranks"}
    head = ["case", "blocks", *SIDES, *counted.values(), *shown.values()]
    lines: list[list[str]] = []
    for x in rows:
        ranks = [f"{x['average'][name]:.1f}" for name in SIDES]
        counts = [f"{sum(x[name])} of {len(x[name])}" for name in counted]
        figures = [f"{x[name]:.2f}" for name in shown]
        lines.append([name_of(x["case"], SEQUENCE), str(x["blocks"]), *ranks, *counts, *figures])
    return markdown(head, lines)


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Returns speed-up and throughput per rank, in Markdown."""
    shown = {
        "speedup": "speed-up on 8 ranks",
        "repacked": "speed-up repacked",
        "repacked_gain": "per rank repacked",
    }
    head = ["case", "blocks", *shown.values(), *(f"per rank on {ranks}" for ranks in SHOWN)]
    lines: list[list[str]] = []
    for x in rows:
        values = [*(x[name] for name in shown), *(x["per_rank"][str(ranks)] for ranks in SHOWN)]
        figures = [f"{value:.2f}" for value in values]
        lines.append([name_of(x["case"], SEQUENCE), str(x["blocks"]), *figures])
    return markdown(head, lines)


def report(result: dict[str, Any]) -> str:
    """Returns the tables, and the paper's figure."""
    paper = result["paper"]
    published = f"The paper: {paper['average']} of {paper['ranks']} GPUs over {paper['case']}."
    tables = [table(result["rows"]), speed_table(result["rows"])]
    return "\n\n".join([*tables, f"{published} {paper['note']}"])


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws throughput per rank and ranks over the run, as the paper's figure 4."""
    figure, axes = pyplot({}).subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for x in (x for x in rows if x["blocks"] == BLOCKS[0]):
        name = name_of(x["case"], SEQUENCE)
        per_rank = [x["per_rank"][str(ranks)] for ranks in SHOWN]
        axes[0].plot(SHOWN, per_rank, marker="o", label=name)
        axes[1].step(range(len(x["ranks"])), x["ranks"], where="post", label=name)
    axes[0].set(xlabel="ranks", ylabel="throughput per rank, dense on 8 = 1", xticks=SHOWN[::-1])
    axes[0].set_title("At the end of the run")
    axes[1].set(xlabel="moment of the run", ylabel="ranks", ylim=(0, RANKS + 0.5))
    axes[1].set_title("Fewest ranks as fast as dense on 8")
    axes[0].legend()
    save_picture(figure, path)


def measure(depths: Sequence[int]) -> dict[str, Any]:
    """Measures every case at each depth of the model."""
    sizes = [(case, blocks) for case in CASES for blocks in depths]
    rows = [row(case, blocks, progress=show_progress) for case, blocks in sizes]
    print(file=sys.stderr)
    return {"rows": rows, "paper": PAPER}


def show_progress(text: str) -> None:
    """Shows a text on one line of stderr."""
    print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)


def main() -> None:
    parser = parser_of(__doc__, picture="repack", reads=True)
    parser.add_argument(
        "--blocks", type=int, nargs="+", choices=BLOCKS, default=BLOCKS, help="depths of the model"
    )
    run(
        parser,
        lambda options: measure(options.blocks),
        lambda result: print(report(result)),
        lambda result, path: draw(result["rows"], path),
    )


if __name__ == "__main__":
    main()
