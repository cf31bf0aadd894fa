"""Cost traces of early exit and mixture of depths, placed by half blocks.

The costs differ at every step: one moment of a trace is one step. The schedule is ZB-H1, with twice
as many microbatches as ranks and without link times. Moves are free.

uniform       whole blocks, spread evenly
best static   one placement for all steps, known in hindsight
pilot         one placement for all steps, the best of another run (`pilot`)
last step     begins as pilot; then the best placement for the costs of the step before
ours          begins as pilot, by `balance.initial`; then a run's own decisions before each step,
              from the readings of the newest steps (`dynmo.plan.replay`)
from uniform  ours, begun at the uniform placement
optimum       the best placement for each step's costs, known at once
perfect       every rank has the same part of all work, as if layers could be cut anywhere

The search for a static placement compares the mean time over all steps. Its candidates are the best
placements for each step's costs (of the pilot, every fourth step's) and for their means, medians
and maxima.

`gain` is the uniform placement's time over another's. Placing whole blocks cannot gain more than
`bound`. `published` are the paper's figures (figure 3).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from statistics import fmean, median
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from benchmarks.cost_traces import (
    Layers,
    best,
    condensed,
    dense,
    in_blocks,
    in_halves,
    name_of,
    perfect,
    timeline,
    trace,
)
from benchmarks.output import markdown
from benchmarks.published import PUBLISHED
from dynmo.cost.layer_cost import LayerCost
from dynmo.plan._replay_kernels import replay as compiled_replay
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.replay import ReplayResult, replay
from dynmo.plan.workload import LayerSection, Moment, Policy, Workload
from dynmo.schedule.catalogue import make

CASES = ("early_exit", "mixture_of_depths")
SEQUENCE = 2048
LIMIT = 0.99  # of best static
PILOT_SEED, THIRD_SEED = 2, 3  # the traces' own is 1
PILOT_STEPS, PILOT_STRIDE = 96, 4
COLUMNS = ("best static", "pilot", "last step", "from uniform", "ours", "optimum", "perfect")


def pilot(case: str, blocks: int, seed: int = PILOT_SEED, steps: int = 24) -> tuple[Layers, ...]:
    """Draws another run of a case, by the same model of costs as its trace.

    Mixture of depths: every second block computes 12.5 % of the tokens, give or take the
    predictor's error. Early exit: from a third of the depth on tokens exit. At first 35 % of them
    reach the end, at last 10 %.
    """
    draw = random.Random(f"{seed} {case} {blocks} {SEQUENCE}")
    if case == "mixture_of_depths":
        drawn = [
            [_selected(draw) if block % 2 else 1.0 for block in range(blocks)] for _ in range(steps)
        ]
        return tuple(_costs(shares, exits=False) for shares in drawn)
    first = blocks // 3
    ends = [0.35 - 0.25 * step / steps + draw.uniform(-0.03, 0.03) for step in range(steps)]
    left = [
        [end ** (max(0, block - first + 1) / (blocks - first)) for block in range(blocks)]
        for end in ends
    ]
    return tuple(_costs(shares, exits=True) for shares in left)


def _selected(draw: random.Random) -> float:
    return min(1.0, max(0.05, 0.125 * math.exp(draw.gauss(0, 0.4))))


def _costs(shares: Sequence[float], exits: bool) -> Layers:
    """Returns the costs of half blocks. Each block computes a share of the tokens.

    The attention's pairs of a routed block fall with the square of the share. Keys and values of
    exited tokens are computed still: half of the products of an attention half.
    """
    whole = dense(len(shares), SEQUENCE)
    layers: list[LayerCost] = []
    for share, attention, feed_forward in zip(shares, whole[::2], whole[1::2], strict=True):
        linear = attention.w * ((1 + share) / 2 if exits else share)
        pairs = (attention.f - attention.w) * (share if exits else share**2)
        layers.append(LayerCost(linear + pairs, linear + 2 * pairs, linear, attention.parameters))
        second = share * feed_forward.f
        layers.append(LayerCost(second, second, second, feed_forward.parameters))
    return tuple(layers)


def decide(case: str, moments: Sequence[Layers], ranks: int, start: Partition) -> ReplayResult:
    """Replays the steps under a run's own decisions, one before each step."""
    workload = Workload(
        name=case,
        steps=len(moments),
        ranks=ranks,
        microbatches=2 * ranks,
        layers=LayerSection(moments=[Moment.of(step, x) for step, x in enumerate(moments)]),
        policy=Policy(every=1, initial=start.counts),
        announced=False,
    )
    return replay(workload)


@final
class Placements:
    """Placements of half blocks on ranks, and how long they take."""

    def __init__(self, blocks: int, ranks: int) -> None:
        self.ranks, self.microbatches = ranks, 2 * ranks
        self.even = in_halves(uniform(blocks, ranks))
        # ZB-H1 orders the ops in the same way whatever they cost, so one schedule serves all.
        self._schedule = make("zb-h1", ranks, self.microbatches)
        self._sends = np.zeros((ranks, 2 * blocks + 1))
        self.place = cache(self._place)
        self._works = cache(self._sums)

    def seconds(self, layers: Layers, placement: Partition) -> float:
        """Returns the makespan of a step."""
        bounds = np.array(placement.bounds, np.int64)
        return compiled_replay(
            self._schedule.order,
            self._schedule.graph,
            np.arange(self.ranks),
            self._works(layers),
            self._sends,
            bounds,
            math.inf,
            True,
        )

    def mean(self, steps: Sequence[Layers], placements: Sequence[Partition]) -> float:
        """Returns the mean makespan of the steps."""
        each = list(placements) * (len(steps) if len(placements) == 1 else 1)
        return fmean(self.seconds(layers, x) for layers, x in zip(steps, each, strict=True))

    def best_static(
        self, steps: Sequence[Layers], stride: int = 1, others: Sequence[Partition] = ()
    ) -> Partition:
        """Searches one placement for all steps."""
        middles = (condensed(steps, middle) for middle in (fmean, median, max))
        candidates = dict.fromkeys(
            [self.even, *others, *map(self.place, (*middles, *steps[::stride]))]
        )
        return min(candidates, key=lambda x: self.mean(steps, [x]))

    def _place(self, layers: Layers) -> Partition:
        return best(layers, self.ranks, self.microbatches, self.even)

    def _sums(self, layers: Layers) -> NDArray[np.float64]:
        return np.array(
            [[list(accumulate((getattr(x, key) for x in layers), initial=0.0))] for key in "fbw"]
        )


def row(
    case: str, blocks: int, ranks: int, steps: int = 24, pilot_steps: int = PILOT_STEPS
) -> dict[str, Any]:
    """Measures one line of the table."""
    moments, on = trace(case, blocks, SEQUENCE)[:steps], Placements(blocks, ranks)
    start = on.best_static(pilot(case, blocks, steps=pilot_steps), PILOT_STRIDE)
    static = on.best_static(moments, others=[start])
    by_last_step = [start, *map(on.place, moments[:-1])]
    optimum = [min((on.place(x), static, start), key=partial(on.seconds, x)) for x in moments]
    ours, from_uniform = (decide(case, moments, ranks, begun) for begun in (start, on.even))
    placements: dict[str, Sequence[Partition]] = {
        "uniform": [on.even],
        "best static": [static],
        "pilot": [start],
        "last step": by_last_step,
        "from uniform": [Partition(counts) for counts in from_uniform.partitions],
        "ours": [Partition(counts) for counts in ours.partitions],
        "optimum": optimum,
    }
    times = {name: on.mean(moments, each) for name, each in placements.items()}
    times["dense"] = timeline(
        in_blocks(dense(blocks, SEQUENCE)), uniform(blocks, ranks), on.microbatches
    ).makespan
    times["perfect"] = fmean(perfect(layers, ranks, on.microbatches).makespan for layers in moments)
    idle = {
        name: fmean(
            timeline(*x, on.microbatches).idle_ratio for x in zip(moments, each, strict=True)
        )
        for name, each in (("static", [on.even] * len(moments)), ("balanced", placements["ours"]))
    }
    third = pilot(case, blocks, THIRD_SEED, pilot_steps)
    return {
        "case": case,
        "blocks": blocks,
        "ranks": ranks,
        "microbatches": on.microbatches,
        "steps": len(moments),
        "pilot_steps": pilot_steps,
        "seconds": times,
        "gain": {name: times["uniform"] / x for name, x in times.items()},
        "over_dense": {name: times["dense"] / x for name, x in times.items()},
        "share_of_best_static": times["best static"] / times["ours"],
        "share_of_optimum": times["optimum"] / times["ours"],
        # Says whether the placement that is best in hindsight also beats the pilot's placement in
        # a third run.
        "best_static_over_pilot_in_a_third_run": on.mean(third, [start]) / on.mean(third, [static]),
        "moves": len(ours.moves),
        "moves_from_uniform": len(from_uniform.moves),
        "idle": idle,
        "bound": -(-blocks // ranks),
        "published": PUBLISHED[case].speedup,
    }


def table(rows: Sequence[dict[str, Any]], ranks: Sequence[int] = (16, 24)) -> str:
    """Returns the table in Markdown."""
    head = [
        "case",
        "blocks",
        "ranks",
        *COLUMNS,
        "ours / best static",
        "ours / optimum",
        "moves",
        "bound",
        "published",
    ]
    lines: list[list[str]] = []
    for x in (row for row in rows if row["ranks"] in ranks):
        start = [name_of(x["case"], SEQUENCE), str(x["blocks"]), str(x["ranks"])]
        shares = [f"{100 * x[key]:.1f} %" for key in ("share_of_best_static", "share_of_optimum")]
        if x["share_of_best_static"] < LIMIT:
            shares[0] += f" (limit: {100 * LIMIT:.0f} %)"
        numbers = [f"{x['gain'][name]:.2f}" for name in COLUMNS]
        lines.append([*start, *numbers, *shares, str(x["moves"]), str(x["bound"]), x["published"]])
    return markdown(head, lines)


def stepwise(
    blocks: Sequence[int], ranks: Sequence[int], cases: Sequence[str] = CASES
) -> dict[str, Any]:
    """Measures all lines of the table, and the least share of best static."""
    rows = [row(case, depth, n) for case in cases for depth in blocks for n in ranks]
    return {
        "stepwise": rows,
        "least_share_of_best_static": min(x["share_of_best_static"] for x in rows),
    }
