"""How few ranks a model needs while it becomes small, in the simulator.

    python -m benchmarks.repack [--json]

The traces of gradual pruning and of early exit (24 moments of a run) start on 8 ranks. At each
moment a side takes the fewest ranks on which a step takes no longer than the DENSE model's step on 8
ranks. The schedule is ZB-H1 with 16 microbatches of constant size, without link times. Costs are
known at once, and moves are free.

    ours         the best placement of half blocks on each number of ranks (`fewest_ranks`)
    first-fit    the paper's algorithm 4: merges neighbours by memory
    best-fit, round-robin, halving (PipeTransformer)

A baseline merges the ranks of the even placement, for every target. It is given the target that
does best. A rank's memory is what `ROOM` ranks of the dense model hold, by parameters that are not
pruned. `proven`: on one rank fewer than ours, no placement under any schedule is fast enough. A
rank cannot begin before the first microbatch has passed the ranks before it, and then has the work
of all microbatches (`least_seconds`, an exhaustive search by dynamic programming).

`average` is over the moments. The paper reports 5.8 of 8 GPUs over gradual pruning (figure 4).
`per_rank` is the throughput per rank on 8, 6, 4 and 2 ranks at the last moment, over the dense
model's on 8. `speedup` compares the best placement on 8 ranks with the even one, and `kept` is the
throughput of `ours` over the dense model's.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.cost_traces import Layers, best, dense, name_of, timeline, trace
from benchmarks.harness import machine, save_picture
from dynmo.balance.partition import Partition, uniform
from dynmo.balance.repack import BASELINES, fewest_ranks

RANKS, MICROBATCHES, ROOM, SEQUENCE = 8, 16, 4, 2048
CASES = ("pruning", "early_exit")
BLOCKS = (24, 32, 40, 48)
SHOWN = (8, 6, 4, 2)
ROUNDED = 1.00001  # the traces have five digits


def seconds_of(layers: Layers) -> Callable[[Partition], float]:
    """The seconds of a step with these costs, by placement."""
    return cache(lambda partition: timeline(layers, partition, MICROBATCHES).makespan)


def of_baseline(name: str, layers: Layers, seconds: Callable[[Partition], float], limit: float, room: float) -> int:
    """The fewest ranks that an algorithm comes to, over all targets, and that are fast enough."""
    even, memory = uniform(len(layers), RANKS), [float(layer.parameters) for layer in layers]
    merged = {BASELINES[name](even, memory, room, target) for target in range(1, RANKS + 1)}
    return min((partition.ranks for partition in merged if seconds(partition) <= limit), default=RANKS)


def least_seconds(layers: Layers, ranks: int) -> float:
    """No placement on so many ranks has a shorter step, whatever the schedule."""
    before = [0.0, *accumulate(layer.f for layer in layers)]
    work = [0.0, *accumulate(MICROBATCHES * layer.seconds for layer in layers)]
    # Of the first layers on the ranks so far.
    least = [0.0] + [math.inf] * len(layers)
    for _ in range(ranks):
        least = [
            min((max(least[start], before[start] + work[stop] - work[start]) for start in range(stop)), default=math.inf)
            for stop in range(len(layers) + 1)
        ]
    return least[-1]


def moment(layers: Layers, limit: float, room: float) -> dict[str, Any]:
    """What each side takes at one moment."""
    seconds = seconds_of(layers)

    def place(ranks: int) -> Partition | None:
        return best(layers, ranks, MICROBATCHES)

    choice = fewest_ranks(place, seconds, limit, RANKS)
    ranks = RANKS if choice is None else choice.partition.ranks
    return {
        "ours": ranks,
        **{name: of_baseline(name, layers, seconds, limit, room) for name in BASELINES},
        "proven": ranks == 1 or least_seconds(layers, ranks - 1) > limit,
        "speedup": seconds(uniform(len(layers), RANKS)) / seconds(best(layers, RANKS, MICROBATCHES)),
        "kept": limit / (seconds(best(layers, RANKS, MICROBATCHES)) if choice is None else choice.seconds),
    }


def row(case: str, blocks: int, stride: int = 1) -> dict[str, Any]:
    """One line of the table. stride: of the moments, every so many-th."""
    whole, moments = dense(blocks, SEQUENCE), trace(case, blocks, SEQUENCE)[::stride]
    limit = ROUNDED * seconds_of(whole)(uniform(2 * blocks, RANKS))
    room = ROOM / RANKS * math.fsum(layer.parameters for layer in whole)
    each = [moment(layers, limit, room) for layers in moments]
    last = moments[-1]
    return {
        "case": case,
        "blocks": blocks,
        "average": {name: fmean(x[name] for x in each) for name in ("ours", *BASELINES)},
        "ranks": [x["ours"] for x in each],
        "proven": [x["proven"] for x in each],
        "speedup": fmean(x["speedup"] for x in each),
        "kept": min(x["kept"] for x in each),
        "throughput": {str(ranks): limit / seconds_of(last)(best(last, ranks, MICROBATCHES)) for ranks in SHOWN},
    }


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, as docs/planning.md shows it."""
    sides = ("ours", *BASELINES)
    lines = [["case", "blocks", *sides, "fewer is impossible at", "least throughput over dense", "speed-up on 8 ranks"]]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for x in rows:
        ranks = [f"{x['average'][name]:.1f}" for name in sides]
        proven = f"{sum(x['proven'])} of {len(x['proven'])}"
        lines.append([name_of(x["case"], SEQUENCE), str(x["blocks"]), *ranks, proven, f"{x['kept']:.2f}", f"{x['speedup']:.2f}"])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Throughput per rank and ranks over the run, as the paper's figure 4."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for x in (x for x in rows if x["blocks"] == BLOCKS[0]):
        name = name_of(x["case"], SEQUENCE)
        axes[0].plot(SHOWN, [RANKS / ranks * x["throughput"][str(ranks)] for ranks in SHOWN], marker="o", label=name)
        axes[1].step(range(len(x["ranks"])), x["ranks"], where="post", label=name)
    axes[0].set(xlabel="ranks", ylabel="throughput per rank, dense on 8 = 1", xticks=SHOWN[::-1], title="At the end of the run")
    axes[1].set(xlabel="moment of the run", ylabel="ranks", ylim=(0, RANKS + 0.5), title="Fewest ranks as fast as dense on 8")
    axes[0].legend()
    save_picture(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--read", type=Path, metavar="FILE", help="figures of an earlier --json, instead of simulating")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it, like docs/pictures/repack.svg")
    parser.add_argument("--blocks", type=int, nargs="+", choices=BLOCKS, default=BLOCKS, help="depths of the model")
    options = parser.parse_args()
    if options.read:
        result = json.loads(options.read.read_text())
    else:
        result = {"rows": [row(case, blocks) for case in CASES for blocks in options.blocks], "machine": machine()}
    if options.plot:
        draw(result["rows"], options.plot)
    print(json.dumps(result) if options.json else table(result["rows"]))


if __name__ == "__main__":
    main()
