"""Does the gain of balancing grow with ranks and with layers, and with microbatches?

Halves of blocks are placed anew at each moment by `exact` and the moment's own costs, unless the
even placement is faster. Moves are free. The schedule is ZB-H1 without link times. `gain` is the
even placement's mean time over that placement's. Each cell is computed with two and with four
microbatches for each rank, at every sixth moment.

The claim "the gain grows with the ranks" holds at a depth if more ranks never gain less. "It grows
with the blocks" holds on so many ranks if more blocks never gain less.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from math import fsum
from typing import Any

from benchmarks.cost_traces import CASES, in_halves, name_of, timeline, trace
from benchmarks.output import markdown
from dynmo.plan.bisection import exact
from dynmo.plan.partition import uniform

ALL_CASES = (*CASES, ("early_exit", 2048), ("mixture_of_depths", 2048), ("moe", 2048))
BLOCKS, RANKS, FACTORS = (24, 32, 40, 48), (8, 16, 24), (2, 4)
STRIDE = 6  # of the moments
SAME = 0.005  # gains that differ by less are the same


def gain(case: str, sequence: int, blocks: int, ranks: int, factor: int, stride: int) -> float:
    """Returns the time of the even placement over that of `exact`, moment by moment."""
    microbatches, even = factor * ranks, in_halves(uniform(blocks, ranks))
    moments = trace(case, blocks, sequence)[::stride]
    pairs = [
        [
            timeline(layers, placement, microbatches).makespan
            for placement in (even, exact([x.seconds for x in layers], ranks))
        ]
        for layers in moments
    ]
    return fsum(static for static, _ in pairs) / fsum(map(min, pairs))


def growth(blocks: Sequence[int], cases: int, stride: int = STRIDE) -> dict[str, Any]:
    """Measures every cell."""
    rows = [
        {
            "case": name_of("experts" if case == "moe" else case, sequence),
            "microbatches_per_rank": factor,
            "ranks": ranks,
            "gain": {
                str(depth): gain(case, sequence, depth, ranks, factor, stride) for depth in blocks
            },
        }
        for case, sequence in ALL_CASES[:cases]
        for factor in FACTORS
        for ranks in RANKS
    ]
    return {"growth": rows, "growth_claims": claims(rows), "growth_stride": stride}


def claims(rows: Sequence[dict[str, Any]], factor: int = 4) -> dict[str, Any]:
    """Counts where the gain grows, and how much more four microbatches for each rank bring."""
    mine = [x for x in rows if x["microbatches_per_rank"] == factor]
    with_ranks = [
        grows(x["gain"][depth] for x in mine if x["case"] == case)
        for case in dict.fromkeys(x["case"] for x in mine)
        for depth in mine[0]["gain"]
    ]
    with_blocks = [grows(x["gain"].values()) for x in mine]
    more = [
        x["gain"][depth] - fewer["gain"][depth]
        for x in mine
        for fewer in rows
        if (fewer["case"], fewer["ranks"]) == (x["case"], x["ranks"])
        and fewer["microbatches_per_rank"] != factor
        for depth in x["gain"]
    ]
    return {
        "with_ranks": sum(with_ranks),
        "of_depths": len(with_ranks),
        "with_blocks": sum(with_blocks),
        "of_ranks": len(with_blocks),
        "more_microbatches": {"least": min(more), "most": max(more)},
    }


def grows(gains: Iterable[float]) -> bool:
    return all(after > before - SAME for before, after in pairwise(gains))


def table(rows: Sequence[dict[str, Any]], factor: int = 4) -> str:
    """Returns the gains by ranks and blocks in Markdown, and where the claim holds."""
    depths = list(rows[0]["gain"])
    head = ["case", "ranks", *(f"{depth} blocks" for depth in depths), "grows with blocks"]
    lines: list[list[str]] = []
    mine = [x for x in rows if x["microbatches_per_rank"] == factor]
    for case in dict.fromkeys(x["case"] for x in mine):
        of_case = [x for x in mine if x["case"] == case]
        lines += [
            [case, str(x["ranks"])]
            + [f"{x['gain'][depth]:.2f}" for depth in depths]
            + ["yes" if grows(x["gain"].values()) else "no"]
            for x in of_case
        ]
        holds = ("yes" if grows(x["gain"][depth] for x in of_case) else "no" for depth in depths)
        lines.append([case, "grows", *holds, ""])
    return markdown(head, lines)


def microbatch_table(rows: Sequence[dict[str, Any]], ranks: int = 24) -> str:
    """Returns the gains with two and with four microbatches for each rank in Markdown."""
    depths = list(rows[0]["gain"])
    head = [f"{ranks} ranks", *(f"{depth} blocks, {n}p" for depth in depths for n in FACTORS)]
    lines: list[list[str]] = []
    for case in dict.fromkeys(x["case"] for x in rows):
        by_factor = {
            x["microbatches_per_rank"]: x["gain"]
            for x in rows
            if (x["case"], x["ranks"]) == (case, ranks)
        }
        lines.append([case, *(f"{by_factor[n][depth]:.2f}" for depth in depths for n in FACTORS)])
    return markdown(head, lines)
