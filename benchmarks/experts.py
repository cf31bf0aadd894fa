"""Mixture of experts in the simulator, under four sides.

The pipeline has 8 stages with 16 replicas of each.

static            whole blocks spread evenly, and contiguous experts, as many on every replica
experts placed    experts placed by counts of tokens (`dynmo.cases.experts.search`), while layers
                  stay: the side that stands for Tutel, which speeds up layers of experts alone
layers balanced   half blocks moved between stages
both              experts first, then half blocks by what the experts then cost

One layer's experts are spread over groups of 8 or 16 replicas. A layer of experts takes as long as
its busiest replica: the replica's tokens over the mean, times a dense feed-forward half. Attention
halves never change. The tokens are drawn by a model (`benchmarks.expert_loads`). Its `skew` says
how uneven the last layers are.

A placement of moment t follows from the counts of moment t - 1. All sides begin as static. Layers
move where the simulator predicts a gain of 2 %, experts where the busiest replica falls by 5 %.
Moves are free and are counted. The schedule is ZB-H1 with 4 microbatches for each stage, as many as
in the paper. There are no link times, and all-to-alls are free.

`gain` is the time of static over another side's. `known at once` is both, decided from the moment's
own counts. `perfect` has the same tokens on every replica and the same work on every stage.
`experts in turn` is static with expert i on replica i mod the group's size.

Three shares of a step are given. `idle` is that of a stage without an op (the paper's bubble ratio,
figure 1). `bubble` is 1 - busiest stage / span. `unused` is the share of all replicas' time that
computes no token, for lack of an op or while the busiest replica of the stage computes.

A second table has the idleness from static to both. The next two have the same for blocks of which
every second one skips tokens (the trace of mixture of depths), in groups of 16. The last replays
the traces of experts that this project uses elsewhere (benchmarks/data/traces/moe-*.json). They
have costs of layers and no counts of tokens, so experts cannot be placed. `even stages` has the
same work on every stage. `published` are the paper's (figure 3). Everything here is simulated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain, pairwise
from statistics import fmean
from typing import Any

from benchmarks.cost_traces import Layers, best, dense, in_halves, perfect, timeline, trace
from benchmarks.expert_loads import Counts, draw_counts
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
from benchmarks.published import PUBLISHED
from dynmo.cases.experts.search import expert_moves, load_bound, loads_of, place_experts
from dynmo.cost.layer_cost import LayerCost
from dynmo.models.group_placement import (
    GroupPlacement,
    even_placement,
)
from dynmo.plan.partition import Partition, moves_between_ranks, uniform

STAGES, BLOCKS, SEQUENCE = 8, 32, 2048
_counts = cache(draw_counts)
MICROBATCHES = 4 * STAGES
DEPTHS = (24, 32, 40, 48)
SKEWS = (0.3, 0.6)
GROUPS = ((8, 0), (8, 1), (16, 0), (16, 1))  # replicas of a group, more places for experts on each
HYSTERESIS = 0.02
SIDES = ("static", "experts placed", "layers balanced", "both")
TITLES = {"experts placed": "experts placed (Tutel-like)"}
SCHEDULES = ("zb-h1", "zb-h2")
PAPER_LEAVES = 0.08  # the paper's bubble ratio after balancing; 0.25 before

Experts = list[GroupPlacement]
"""One placement for each block. All groups of a stage share it."""


# -- experts ---------------------------------------------------------------------------------------


def groups_of(counts: Counts, replicas: int) -> list[Counts]:
    """Returns the counts of each group of replicas."""
    return [counts[first : first + replicas] for first in range(0, len(counts), replicas)]


def busiest(placement: GroupPlacement, counts: Counts) -> float:
    """Returns the tokens of the busiest replica of all groups, over the mean."""
    loads = [
        load for group in groups_of(counts, placement.ranks) for load in loads_of(placement, group)
    ]
    return max(loads) / fmean(loads)


def summed(counts: Counts, replicas: int) -> Counts:
    """Returns the counts of all groups together, by place in the group."""
    return [
        [sum(column) for column in zip(*rows, strict=True)]
        for rows in zip(*groups_of(counts, replicas), strict=True)
    ]


def least_busiest(counts: Counts, replicas: int, per_rank: int) -> float:
    """Returns a lower bound of the busiest replica's tokens, over the mean.

    It holds for any placement.
    """
    total = summed(counts, replicas)
    return load_bound(total, replicas, per_rank) * replicas / sum(map(sum, total))


def place(moments: Sequence[Sequence[Counts]], replicas: int, more: int) -> list[Experts]:
    """Places the experts of each moment by the counts of the moment before."""
    experts = len(moments[0][0][0])
    placements = [[even_placement(experts, replicas)] * len(moments[0])]
    for counts in moments[:-1]:
        placements.append(replace(placements[-1], counts, more))
    return placements


def replace(current: Experts, counts: Sequence[Counts], more: int) -> Experts:
    """Places the experts of every block anew, where it pays."""
    replicas = current[0].ranks
    per_rank = current[0].groups // replicas + more
    return [
        place_experts(summed(x, replicas), replicas, per_rank, now)
        for now, x in zip(current, counts, strict=True)
    ]


# -- layers ----------------------------------------------------------------------------------------


def layers_of(placements: Experts, counts: Sequence[Counts], base: Layers) -> Layers:
    """Returns the costs of the half blocks.

    Each layer of experts takes as long as its busiest replica.

    Args:
        placements: By block.
        counts: By block.
        base: The costs of the half blocks if all replicas had the same tokens.
    """
    layers = list(base)
    for block, (placement, tokens) in enumerate(zip(placements, counts, strict=True)):
        x, factor = layers[2 * block + 1], busiest(placement, tokens)
        layers[2 * block + 1] = LayerCost(factor * x.f, factor * x.b, factor * x.w, x.parameters)
    return tuple(layers)


def balance(expected: Sequence[Layers]) -> list[Partition]:
    """Places the layers of each moment where it pays."""
    out = [in_halves(uniform(len(expected[0]) // 2, STAGES))]
    for layers in expected:
        proposed = best(layers, STAGES, MICROBATCHES, out[-1])
        now, then = (timeline(layers, x, MICROBATCHES).makespan for x in (out[-1], proposed))
        out.append(proposed if then <= (1 - HYSTERESIS) * now else out[-1])
    return out


def _level(layers: Layers) -> Layers:
    """Returns layers of equal costs with the same work in all."""
    f, b, w = (fmean(getattr(x, key) for x in layers) for key in "fbw")
    return (LayerCost(f, b, w),) * len(layers)


def time_of(
    moments: Sequence[Layers], partitions: Sequence[Partition], base: Sequence[Layers] = ()
) -> dict[str, Any]:
    """Returns the mean seconds of a step, and the mean shares without work.

    Args:
        moments: The costs.
        partitions: The placement of each moment.
        base: The costs if all replicas had the same tokens. Not given: those of a dense model.
    """
    played = [timeline(*x, MICROBATCHES) for x in zip(moments, partitions, strict=True)]
    even = base or [dense(len(moments[0]) // 2, SEQUENCE)] * len(moments)
    work = [MICROBATCHES * sum(layer.seconds for layer in layers) for layers in even]
    result: dict[str, Any] = {
        "seconds": fmean(x.makespan for x in played),
        "bubble": fmean(x.bubble_ratio for x in played),
        "unused": fmean(
            1 - x / STAGES / step.makespan for x, step in zip(work, played, strict=True)
        ),
        "idle": {},
    }
    for schedule in SCHEDULES:
        result["idle"][schedule] = fmean(
            timeline(*x, MICROBATCHES, schedule).idle_ratio
            for x in zip(moments, partitions, strict=True)
        )
    return result


# -- rows ------------------------------------------------------------------------------------------


def row(
    skew: float, replicas: int, more: int, blocks: int = BLOCKS, stride: int = 1
) -> dict[str, Any]:
    """Measures one line of the first table."""
    return {"skew": skew} | compare(_counts(blocks, skew)[::stride], replicas, more)


def with_depths(stride: int = 1) -> list[dict[str, Any]]:
    """Measures blocks that skip tokens and have experts, as the paper's mixture of depths."""
    base = trace("mixture_of_depths", BLOCKS, SEQUENCE)[::stride]
    counts, published = _counts(BLOCKS, SKEWS[-1])[::stride], PUBLISHED["mixture_of_depths"].speedup
    return [
        {"skew": SKEWS[-1]} | compare(counts, *group, base) | {"published": published}
        for group in GROUPS[2:]
    ]


def compare(
    counts: Sequence[Sequence[Counts]], replicas: int, more: int, given: Sequence[Layers] = ()
) -> dict[str, Any]:
    """Compares the sides on the tokens of each moment and block.

    Args:
        counts: By moment and block.
        replicas: Replicas of a group.
        more: More places for experts on each replica.
        given: The costs of each moment if all replicas had the same tokens. Not given: those of a
            dense model.
    """
    moments, blocks, experts = len(counts), len(counts[0]), len(counts[0][0][0])
    even = [[even_placement(experts, replicas)] * blocks] * moments
    in_turn = [GroupPlacement(tuple((i % replicas,) for i in range(experts)), replicas)] * blocks
    placed_experts = place(counts, replicas, more)
    # The placements of a moment's own counts.
    known_experts = [replace(now, x, more) for now, x in zip(placed_experts, counts, strict=True)]
    halves = [in_halves(uniform(blocks, STAGES))] * moments
    base = given or [dense(blocks, SEQUENCE)] * moments

    def costs(placements: Sequence[Experts]) -> list[Layers]:
        return [layers_of(*x) for x in zip(placements, counts, base, strict=True)]

    static, by_experts, known = costs(even), costs(placed_experts), costs(known_experts)
    balanced = balance(static[:-1])
    # What the experts' next places would have cost.
    expected = [layers_of(*x) for x in zip(placed_experts[1:], counts[:-1], base[:-1], strict=True)]
    both = balance(expected)
    timed, level = partial(time_of, base=base), [_level(x) for x in given] or base[:1]
    sides = {
        "static": timed(static, halves),
        "experts placed": timed(by_experts, halves),
        "layers balanced": timed(static, balanced),
        "both": timed(by_experts, both),
        "experts in turn": timed(costs([in_turn] * moments), halves),
        "known at once": timed(known, [best(x, STAGES, MICROBATCHES, halves[0]) for x in known]),
        "perfect": time_of(level, halves[: len(level)], level),
    }
    per_rank = experts // replicas + more
    ratios = {"static": even, "placed": placed_experts, "known at once": known_experts}
    return {
        "expert": replicas,
        "per_rank": per_rank,
        "blocks": blocks,
        "stages": STAGES,
        "replicas": len(counts[0][0]),
        "microbatches": MICROBATCHES,
        "sides": sides,
        "gain": {name: sides["static"]["seconds"] / x["seconds"] for name, x in sides.items()},
        "busiest": mean_busiest(ratios, counts)
        | {"bound": fmean(least_busiest(x, replicas, per_rank) for x in chain(*counts))},
        "moves": {
            "experts of a layer and moment": fmean(
                len(expert_moves(*x))
                for before, after in pairwise(placed_experts)
                for x in zip(before, after, strict=True)
            ),
            "layers balanced": moved(balanced),
            "both": moved(both),
        },
        "published": PUBLISHED["moe"].speedup,
    }


def mean_busiest(
    sides: Mapping[str, Sequence[Experts]], counts: Sequence[Sequence[Counts]]
) -> dict[str, float]:
    """Returns the busiest replica's tokens over the mean, by side."""
    return {
        name: fmean(busiest(*x) for x in zip(chain(*placements), chain(*counts), strict=True))
        for name, placements in sides.items()
    }


def moved(partitions: Sequence[Partition]) -> dict[str, int]:
    """Counts how often layers moved, and how many half blocks in all."""
    each = [len(moves_between_ranks(old, new)) for old, new in pairwise(partitions)]
    return {"times": sum(map(bool, each)), "layers": sum(each)}


def trace_row(blocks: int, stride: int = 1) -> dict[str, Any]:
    """Measures one line of the second table: the trace of experts at this depth."""
    moments = trace("moe", blocks, SEQUENCE)[::stride]
    halves = [in_halves(uniform(blocks, STAGES))] * len(moments)
    balanced = balance(moments[:-1])
    sides = {
        "static": time_of(moments, halves),
        "layers balanced": time_of(moments, balanced),
        "known at once": time_of(
            moments, [best(x, STAGES, MICROBATCHES, halves[0]) for x in moments]
        ),
    }
    even = fmean(perfect(x, STAGES, MICROBATCHES).makespan for x in moments)
    gain = {name: sides["static"]["seconds"] / x["seconds"] for name, x in sides.items()}
    gain |= {"even stages": sides["static"]["seconds"] / even}
    gain |= {
        "perfect": sides["static"]["seconds"]
        / time_of([dense(blocks, SEQUENCE)], halves[:1])["seconds"]
    }
    return {
        "blocks": blocks,
        "stages": STAGES,
        "sides": sides,
        "gain": gain,
        "moves": moved(balanced),
        "published": PUBLISHED["moe"].speedup,
    }


# -- output ----------------------------------------------------------------------------------------


def table(rows: Sequence[dict[str, Any]], first: str = "skew") -> str:
    """Returns the speed-ups in Markdown. `first` is the key of the first column."""
    head = [
        first,
        "replicas of a group",
        "experts on each",
        "busiest replica: static",
        "placed",
        "bound",
    ]
    head += [TITLES.get(side, side) for side in SIDES[1:]]
    head += ["known at once", "perfect", "experts that move", "half blocks that move"]
    lines: list[list[str]] = []
    for x in rows:
        ratios = [f"{x['busiest'][name]:.2f}" for name in ("static", "placed", "bound")]
        gains = [f"{x['gain'][name]:.2f}" for name in (*SIDES[1:], "known at once", "perfect")]
        experts = f"{x['moves']['experts of a layer and moment']:.1f}"
        halves = " / ".join(str(x["moves"][name]["layers"]) for name in ("layers balanced", "both"))
        lines.append([*start_of(x, first), *ratios, *gains, experts, halves])
    return markdown(head, lines, "r" * len(head))


def idle_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the shares of a step without work in Markdown, from static to both."""
    head = [
        "skew",
        "replicas of a group",
        "experts on each",
        "idle",
        "idle with ZB-H2",
        "bubble",
        "unused",
    ]
    lines: list[list[str]] = []
    for x in rows:
        before, after = (x["sides"][name] for name in ("static", "both"))
        pairs = [(before["idle"][name], after["idle"][name]) for name in SCHEDULES]
        pairs += [(before[name], after[name]) for name in ("bubble", "unused")]
        lines.append([*start_of(x), *(f"{100 * a:.1f} to {100 * b:.1f} %" for a, b in pairs)])
    return markdown(head, lines, "r" * len(head))


def start_of(x: dict[str, Any], first: str = "skew") -> list[str]:
    return [str(x[first]), str(x["expert"]), str(x["per_rank"])]


def trace_table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the traces in Markdown."""
    names = ("layers balanced", "known at once", "even stages", "perfect")
    lines: list[list[str]] = []
    for x in rows:
        gains = [f"{x['gain'][name]:.2f}" for name in names]
        idle = [
            f"{100 * x['sides'][name]['idle']['zb-h1']:.1f} %"
            for name in ("static", "layers balanced")
        ]
        lines.append([str(x["blocks"]), *gains, *idle, str(x["moves"]["layers"]), x["published"]])
    head = ["blocks", *names, "idle, static", "idle, balanced"]
    head += ["half blocks that move", "the paper's"]
    return markdown(head, lines, "r" * len(head))


def draw(result: dict[str, Any]) -> dict[str, Any]:
    """Draws the speed-ups of each row beside the paper's range."""
    rows = result["rows"]
    figure, axes = pyplot().subplots(figsize=(WIDTH, 3.8))
    sides = {
        "experts placed": "#56b4e9",
        "layers balanced": "#d55e00",
        "both": "#0072b2",
        "perfect": "#bbbbbb",
    }
    groups = [f"skew {x['skew']}\n{x['expert']} replicas\n{x['per_rank']} each" for x in rows]
    bars(axes, groups, {name: (sides[name], [x["gain"][name] for x in rows]) for name in sides})
    axes.axhspan(1.21, 1.23, color="#333333", alpha=0.4, label="the paper's", zorder=0)
    axes.set(
        xlabel="skew of the loads, replicas, experts on a rank",
        ylabel="speed-up over static, simulated",
        ylim=(0.9, None),
    )
    legend_above(figure, 5)
    return {"experts": figure}


def measure(stride: int) -> dict[str, Any]:
    """Measures all rows of both tables."""
    rows = [row(skew, *group, stride=stride) for skew in SKEWS for group in GROUPS]
    least = {schedule: rows[0]["sides"]["perfect"]["idle"][schedule] for schedule in SCHEDULES}
    return {
        "simulated": True,
        "rows": rows,
        "with_depths": with_depths(stride),
        "traces": [trace_row(blocks, stride) for blocks in DEPTHS],
        "least_idle": least,
        "paper": {
            "speedup": PUBLISHED["moe"].speedup,
            "over": PUBLISHED["moe"].baseline,
            "idle": [0.25, PAPER_LEAVES],
        },
        "half_of_what_the_paper_leaves": {
            schedule: {
                "bound": x <= PAPER_LEAVES / 2,
                "rows": sum(r["sides"]["both"]["idle"][schedule] <= PAPER_LEAVES / 2 for r in rows),
            }
            for schedule, x in least.items()
        },
    }


def main() -> None:
    parser = parser_of(__doc__, draws=True, reads=True)
    add_number(parser, "stride", 1, "of the 24 moments, every so many-th")
    run(
        parser,
        lambda options: measure(options.stride),
        show,
        draw,
    )


def show(result: dict[str, Any]) -> None:
    """Prints the tables, and the figures that they lack."""
    texts = {
        "speed-up over static": table(result["rows"]),
        "shares of a step without work": idle_table(result["rows"]),
        "blocks that skip tokens, too": table(result["with_depths"]),
        "their shares of a step without work": idle_table(result["with_depths"]),
        "traces of layers": trace_table(result["traces"]),
    }
    for title, text in texts.items():
        print(f"simulated: {title}\n\n{text}\n")
    shown = ("rows", "with_depths", "traces")
    others = {key: value for key, value in result.items() if key not in shown}
    print(json.dumps(others, indent=1))


if __name__ == "__main__":
    main()
