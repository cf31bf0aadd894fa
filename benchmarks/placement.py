"""Placement of layers on stages: time, distance to the optimum, and gain.

The gain is measured on fixed cost traces.

times           `exact`, warm (best of several) and in a new process
brute_force     `exact` against every placement, under memory limits
chunked         several stages per rank: over equal shares
diffusion       rounds, and the distance to the optimum in heaviest layers
schedule_aware  under the best and the worst placement of the least bottleneck
traces          48 blocks on 24 ranks, 24 moments of each case (benchmarks/data/traces: models of
                cost, per half block). The gain is over as many blocks on every rank: the ratio of
                the bottlenecks summed over the moments. It is None where the balancer's answer
                cannot run at some moments (cannot_run_at: at how many).
lemmas          the lemmas of DynMo's appendix C.3 (benchmarks.lemmas)
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations, pairwise
from statistics import mean, median
from typing import Any

from benchmarks import lemmas
from benchmarks.baselines.placements import algorithm_3, deepspeed_time, published_diffusion
from benchmarks.cost_traces import problem_of, profile_of, timeline, trace
from benchmarks.harness import elapsed
from benchmarks.output import add_number, parser_of, run, show
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.balancers import Balancer, balancer, diffuse
from dynmo.plan.bisection import exact
from dynmo.plan.chunks import chunked
from dynmo.plan.costs import freeze
from dynmo.plan.evaluate import evaluate
from dynmo.plan.partition import Partition, stage_loads, uniform
from dynmo.plan.placement import place
from dynmo.plan.problem import Choice, Mesh, Problem
from dynmo.schedule.memory import MemoryLimits

RANKS = 24
MESH = Mesh(RANKS, 1, 2 * RANKS, 1, "zb-h1")
WEIGHTS: dict[str, Callable[[random.Random], float]] = {
    "uniform": lambda draw: draw.random(),
    "lognormal": lambda draw: draw.lognormvariate(0, 1),
    "two kinds": lambda draw: draw.choice([0.42857, 0.57143]),
    "equal": lambda draw: 0.1,
}


def best_of(run: Callable[[], object], times: int) -> float:
    """Returns the least milliseconds of several runs."""
    return 1000 * min(elapsed(run) for _ in range(times))


def times_of(repeat: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for layers, ranks in ((96, 24), (10_000, 1_024)):
        for kind, weight in WEIGHTS.items():
            draw = random.Random(kind)
            weights = [weight(draw) for _ in range(layers)]
            memory = some_memory(draw, weights, ranks)
            current = uniform(layers, ranks)
            runs = repeat * (10 if layers < 1000 else 1)
            out.append(
                {
                    "layers": layers,
                    "ranks": ranks,
                    "weights": kind,
                    "ms": best_of(lambda w=weights, r=ranks: exact(w, r), runs),
                    "ms_with_current": best_of(
                        lambda w=weights, r=ranks, c=current: exact(w, r, current=c), runs
                    ),
                    "ms_with_memory": best_of(
                        lambda w=weights, r=ranks, m=memory: exact(w, r, memory=m), runs
                    ),
                }
            )
    return out


def some_memory(draw: random.Random, weights: list[float], ranks: int) -> MemoryLimits:
    """Draws memory limits of 1.6 times an equal share.

    Stage s keeps ranks - s microbatches, as in 1F1B.
    """
    layers = tuple(
        LayerCost(x, 0, 0, weight_bytes=draw.randint(1, 10), activation_bytes=draw.randint(1, 10))
        for x in weights
    )
    share = [
        sum(x.weight_bytes for x in layers) / ranks,
        sum(x.activation_bytes for x in layers) / ranks,
    ]
    limits = tuple(int(1.6 * (share[0] + (ranks - s) * share[1])) for s in range(ranks))
    return MemoryLimits(layers, tuple(((ranks - s, 0),) for s in range(ranks)), limits)


def cold() -> dict[str, float]:
    """Measures a new process with the compiled code cached."""
    code = (
        "import time; a = time.perf_counter(); "
        "from dynmo.plan.bisection import exact; b = time.perf_counter(); "
        "exact([1.0 + i % 7 for i in range(96)], 24); print(b - a, time.perf_counter() - b)"
    )
    best = min(
        (
            tuple(
                map(
                    float,
                    subprocess.run(
                        [sys.executable, "-c", code], capture_output=True, text=True, check=True
                    ).stdout.split(),
                )
            )
            for _ in range(3)
        ),
        key=sum,
    )
    return {"import": best[0], "first_call": best[1]}


def brute_force(cases: int) -> dict[str, int]:
    draw = random.Random(0)
    equal = feasible = 0
    for _ in range(cases):
        layers = draw.randint(1, 11)
        ranks = draw.randint(1, min(layers, 6))
        weights = [
            draw.random() if draw.random() < 0.5 else float(draw.randint(0, 4))
            for _ in range(layers)
        ]
        costs = tuple(
            LayerCost(
                0,
                0,
                0,
                weight_bytes=draw.randint(0, 5),
                activation_bytes=draw.randint(0, 5),
                stash_bytes=draw.randint(0, 3),
            )
            for _ in weights
        )
        resident = tuple(((ranks - s, 0), (1, draw.randint(0, 2))) for s in range(ranks))
        memory = MemoryLimits(costs, resident, tuple(draw.randint(10, 80) for _ in range(ranks)))
        every = (
            Partition.from_bounds([0, *cuts, layers])
            for cuts in combinations(range(1, layers), ranks - 1)
        )
        best = min(
            (
                max(stage_loads(weights, x))
                for x in every
                if all(memory.fits(s, a, b) for s, (a, b) in enumerate(pairwise(x.bounds)))
            ),
            default=None,
        )
        try:
            bottleneck = max(stage_loads(weights, exact(weights, ranks, memory=memory)))
        except PartitionError:
            bottleneck = None
        feasible += best is not None
        equal += bottleneck == best
    return {"cases": cases, "feasible": feasible, "equal": equal}


def chunks_table() -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for name, ranks, count, layers in (
        ("v", 8, 2, 66),
        ("v", 24, 2, 98),
        ("looped", 4, 2, 34),
        ("looped", 8, 3, 98),
        ("looped", 12, 4, 98),
    ):
        placement = (
            (*range(ranks), *reversed(range(ranks))) if name == "v" else tuple(range(ranks)) * count
        )
        over: list[float] = []
        took: list[float] = []
        for seed in range(5):
            draw = random.Random(seed)
            weights = [draw.uniform(0.5, 1.5) for _ in range(layers)]
            start = time.perf_counter()
            balanced = chunked(weights, placement)
            took.append(time.perf_counter() - start)
            loads = [0.0] * ranks
            for load, rank in zip(stage_loads(weights, balanced), placement, strict=True):
                loads[rank] += load
            over.append(max(loads) / max(sum(weights) / ranks, max(weights)) - 1)
        out.append(
            {
                "placement": name,
                "ranks": ranks,
                "stages": len(placement),
                "layers": layers,
                "over_equal_shares": mean(over),
                "seconds": min(took),
            }
        )
    return out


def diffusion_table(cases: int) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for kind in ("uniform", "lognormal", "two kinds"):
        draw = random.Random(kind)
        rounds: list[int] = []
        distance: list[float] = []
        share: list[float] = []
        for _ in range(cases):
            layers = draw.randint(8, 120)
            ranks = draw.randint(2, min(layers, 32))
            weights = [WEIGHTS[kind](draw) for _ in range(layers)]
            cuts = sorted(draw.sample(range(1, layers), ranks - 1))
            diffusion = diffuse(
                weights,
                uniform(layers, ranks)
                if draw.random() < 0.5
                else Partition.from_bounds([0, *cuts, layers]),
            )
            best = max(stage_loads(weights, exact(weights, ranks)))
            largest = max(stage_loads(weights, diffusion[-1]))
            rounds.append(len(diffusion) - 1)
            distance.append((largest - best) / max(weights))
            share.append(largest / best - 1)
        distance.sort()
        out.append(
            {
                "weights": kind,
                "cases": cases,
                "within_one_layer": mean(x <= 1 for x in distance),
                "optimal": mean(x <= 1e-12 for x in distance),
                "distance_in_heaviest_layers": {
                    "mean": mean(distance),
                    "99%": distance[int(0.99 * cases)],
                    "largest": distance[-1],
                },
                "over_optimum": {"mean": mean(share), "largest": max(share)},
                "rounds": {"median": median(rounds), "largest": max(rounds)},
            }
        )
    return out


def schedule_table(cases: int) -> list[dict[str, Any]]:
    """Simulates all placements of the least bottleneck.

    There are 18 halves on 5 ranks, with a frozen prefix of 6 to 12 of them.
    """
    blocks = tuple(
        LayerCost(1.0, 1.0, 0.8) if i % 2 else LayerCost(1.2, 1.4, 0.6) for i in range(18)
    )
    out: list[dict[str, Any]] = []
    for name in ("1f1b", "zb-h1", "zb-h2"):
        for microbatches in (6, 12, 20):
            draw, mesh = random.Random(3), Mesh(5, 1, microbatches, 1, name)
            best: list[float] = []
            worst: list[float] = []
            for _ in range(cases):
                layers = freeze(blocks, draw.randint(6, 12))
                weights = [x.seconds for x in layers]
                least = max(stage_loads(weights, exact(weights, 5))) * (1 + 1e-12)
                every = (
                    Partition.from_bounds([0, *cuts, 18]) for cuts in combinations(range(1, 18), 4)
                )
                problem = Problem(profile_of(layers))
                spans = [
                    evaluate(problem, Choice(mesh, x)).step
                    for x in every
                    if max(stage_loads(weights, x)) <= least
                ]
                seconds = place(problem, mesh).step
                best.append(min(spans) / seconds - 1)
                worst.append(max(spans) / seconds - 1)
            out.append(
                {
                    "schedule": name,
                    "microbatches": microbatches,
                    "best_tie_over_it": mean(best),
                    "worst_tie_over_it": mean(worst),
                    "worst": max(worst),
                }
            )
    return out


def trace_row(case: str) -> dict[str, Any]:
    moments = trace(case, 48, 2048)
    total = dict.fromkeys(
        ("blocks", "halves", "equal shares", *_BALANCERS, "algorithm-3 (loads)"), 0.0
    )
    base = 0.0
    refused: dict[str, int] = dict.fromkeys(_BALANCERS, 0)
    current = uniform(96, RANKS)
    for layers in moments:
        halves = [x.seconds for x in layers]
        blocks = [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)]
        base += max(stage_loads(blocks, uniform(48, RANKS)))
        total["blocks"] += max(stage_loads(blocks, exact(blocks, RANKS)))
        total["halves"] += max(stage_loads(halves, exact(halves, RANKS)))
        total["equal shares"] += sum(halves) / RANKS
        held = published_diffusion(halves, current).ranks
        total["algorithm-3 (loads)"] += max(sum(halves[i] for i in own) for own in held)
        problem = problem_of(layers)
        now = evaluate(problem, Choice(MESH, current))
        for name in _BALANCERS:
            try:
                total[name] += max(stage_loads(halves, _BALANCERS[name](problem, now)))
            except PartitionError:
                refused[name] += 1
    gains = {name: None if refused.get(name) else base / x for name, x in total.items()}
    return {
        "case": case,
        "cannot_run_at": {name: count for name, count in refused.items() if count},
    } | gains


_BALANCERS: dict[str, Balancer] = {
    "diffusion": balancer("diffusion"),
    "deepspeed-time": deepspeed_time,
    "algorithm-3": algorithm_3,
}


def simulated_row(case: str) -> dict[str, Any]:
    """Returns the gain in simulated makespan.

    The schedule is ZB-H1 with 48 microbatches, at a moment in six.
    """
    base = blind = seeing = 0.0
    for layers in trace(case, 48, 2048)[::6]:
        base += timeline(layers, uniform(96, RANKS), 48).makespan
        problem = problem_of(layers)
        blind += place(problem, MESH, quick=True).step
        seeing += place(problem, MESH).step
    return {"exact": base / blind, "schedule-aware": base / seeing}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    cases = ("early_exit", "freezing", "pruning", "moe", "mixture_of_depths", "sparse_attention")
    of_lemmas = {
        "lemmas": {"lemma_1": lemmas.lemma_1(), "lemma_2": lemmas.lemma_2(options.cases // 5)}
    }
    if options.only:
        return of_lemmas
    return {
        "times": times_of(options.repeat),
        "cold_seconds": cold(),
        "brute_force": brute_force(options.cases),
        "chunked": chunks_table(),
        "diffusion": diffusion_table(options.cases // 2),
        "schedule_aware": schedule_table(6),
        "traces": [trace_row(case) | {"simulated": simulated_row(case)} for case in cases],
    } | of_lemmas


def show_tables(result: dict[str, Any]) -> None:
    show({name: part for name, part in result.items() if name != "lemmas"})
    print(lemmas.lemma_1_table(result["lemmas"]["lemma_1"]))
    print(lemmas.lemma_2_table(result["lemmas"]["lemma_2"]))


if __name__ == "__main__":
    parser = parser_of(__doc__)
    add_number(parser, "repeat", 5, "runs of which the best counts")
    add_number(parser, "cases", 1000, "random cases against brute force")
    parser.add_argument("--only", choices=["lemmas"], help="one part of the figures")
    run(parser, measure, show_tables)
