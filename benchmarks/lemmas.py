"""The lemmas of DynMo's appendix C.3 beside what placements do. A part of `benchmarks.placement`.

lemma_1  24 equal layers on 4 ranks, 8 microbatches of ZB-H1, a slow link in the middle. F, B and W
         of a layer take 1. Least load against least simulated span.
lemma_2  rounds of path diffusion beside the lemma's bound, and the order of layers that Algorithm 3
         leaves. 4 layers a rank with random loads, from the even or from a random placement.

S of the bound is the load of all layers, the largest gap that there can be. Its unit is the mean
load of a layer. g is one layer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from benchmarks.baselines.placements import in_order, published_diffusion
from benchmarks.cost_traces import profile_of
from benchmarks.output import markdown
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.balancers import balancer, diffuse
from dynmo.plan.bisection import exact
from dynmo.plan.evaluate import Plan, evaluate
from dynmo.plan.partition import Partition, stage_loads, uniform
from dynmo.plan.problem import Choice, Mesh, Problem

LAYERS = (LayerCost(1.0, 1.0, 1.0, output_bytes=1),) * 24
LINKS = (0, 4, 8, 12)
MESH = Mesh(4, 1, 8, 1, "zb-h1")
RANKS = (4, 8, 16, 24)


def lemma_1(links: Sequence[int] = LINKS) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for link in links:
        problem = Problem(profile_of(LAYERS, (0.0, link, 0.0)))
        now = evaluate(problem, Choice(MESH, uniform(24, 4)))
        sides = {"least load": exact([x.seconds for x in LAYERS], 4)}
        sides |= {name: balancer(name)(problem, now) for name in ("exact", "diffusion")}
        plans = {name: evaluate(problem, Choice(MESH, x)) for name, x in sides.items()}
        rows.append({"link": link} | {name: _figures(plan) for name, plan in plans.items()})
    return rows


def _figures(plan: Plan) -> dict[str, Any]:
    return {
        "layers": plan.partition.counts,
        "imbalance": plan.imbalance,
        "span": plan.step,
        "idle": plan.timeline.idle_ratio,
    }


def lemma_2(cases: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for ranks in RANKS:
        draw, layers = random.Random(ranks), 4 * ranks
        rounds: list[int] = []
        over: list[float] = []
        broken: list[bool] = []
        for _ in range(cases):
            weights = [draw.lognormvariate(0, 0.5) for _ in range(layers)]
            cuts = sorted(draw.sample(range(1, layers), ranks - 1))
            even = draw.random() < 0.5
            start = uniform(layers, ranks) if even else Partition.from_bounds([0, *cuts, layers])
            diffusion = diffuse(weights, start)
            least = max(stage_loads(weights, exact(weights, ranks)))
            rounds.append(len(diffusion) - 1)
            over.append(max(stage_loads(weights, diffusion[-1])) / least - 1)
            broken.append(_is_broken(weights, start))
        rows.append(
            {
                "ranks": ranks,
                "layers": layers,
                "cases": cases,
                "rounds": {"median": median(rounds), "largest": max(rounds)},
                "bound": bound(ranks, layers),
                "bound_of_the_proof": bound_of_the_proof(ranks, layers),
                "optimal": mean(x <= 1e-9 for x in over),
                "over_optimum": max(over),
                "out_of_order": mean(broken),
            }
        )
    return rows


def bound(ranks: int, load: float, gap: float = 1.0) -> float:
    """Returns the lemma's expression without its constant: O(..) has none."""
    log = math.log(ranks)
    return min(ranks**2 * math.log(load * ranks / gap) * log, load * ranks * log / gap)


def bound_of_the_proof(ranks: int, load: float, gap: float = 1.0) -> float:
    """Returns the rounds that the proof counts, each of which lessens the gaps."""
    return 60 * ranks**2 * math.log(2 * ranks) * math.log(load * ranks**2 / gap)


def _is_broken(weights: Sequence[float], start: Partition) -> bool:
    try:
        in_order(published_diffusion(weights, start))
    except PartitionError:
        return True
    return False


def lemma_1_table(rows: Sequence[dict[str, Any]]) -> str:
    names = ("least load", "exact", "diffusion")
    lines = [
        [str(x["link"])]
        + [
            cell
            for name in names
            for cell in (
                "+".join(map(str, x[name]["layers"])),
                f"{x[name]['span']:.0f}",
                f"{x[name]['idle']:.1%}",
            )
        ]
        for x in rows
    ]
    head = ["link", *(cell for name in names for cell in (name, "span", "idle"))]
    return markdown(head, lines, "r" + "lrr" * len(names))


def lemma_2_table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["ranks", "rounds", "at most", "bound", "with its constant", "at the optimum", "excess"]
    lines = [
        [
            str(x["ranks"]),
            f"{x['rounds']['median']:.0f}",
            str(x["rounds"]["largest"]),
            f"{x['bound']:,.0f}",
            f"{x['bound_of_the_proof']:,.0f}",
            f"{x['optimal']:.0%}",
            f"{x['over_optimum']:.1%}",
            f"{x['out_of_order']:.0%}",
        ]
        for x in rows
    ]
    return markdown([*head, "Algorithm 3 out of order"], lines, "r" * 8)
