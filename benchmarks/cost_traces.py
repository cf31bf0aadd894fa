"""Fixed cost traces that several benchmarks replay, placed and timed.

The simulator times them: with ZB-H1 if not said otherwise, and without link times.

Each trace (benchmarks/data/traces) is a model of cost, per half block, at 24 moments of a training
run.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import Costs, LayerCost, StageCost
from dynmo.plan.evaluate import evaluate
from dynmo.plan.partition import Partition
from dynmo.plan.placement import place
from dynmo.plan.problem import Choice, Mesh, Problem, Work
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import make
from dynmo.schedule.simulator import Timeline, simulate

TRACES = Path(__file__).parent / "data" / "traces"
CASES = (
    ("freezing", 2048),
    ("pruning", 2048),
    ("sparse_attention", 2048),
    ("sparse_attention", 32768),
)
HIDDEN = 1024

Layers = tuple[LayerCost, ...]


def name_of(case: str, sequence: int) -> str:
    """Returns the name of a case for people."""
    return case.replace("_", " ") + (
        f", {sequence // 1024}k tokens" if case == "sparse_attention" else ""
    )


# -- the traces ------------------------------------------------------------------------------------


@cache
def trace(case: str, blocks: int, sequence: int) -> tuple[Layers, ...]:
    """Loads the costs of the half blocks at every moment."""
    data = json.loads((TRACES / f"{case}-{blocks}-{sequence}.json").read_text())
    densities = (
        pruned(blocks, sequence, data["seed"], len(data["f"])) if case == "pruning" else None
    )
    moments: list[Layers] = []
    for moment, rows in enumerate(zip(data["f"], data["b"], data["w"], strict=True)):
        layers: list[LayerCost] = []
        for layer, (f, b, w) in enumerate(zip(*rows, strict=True)):
            whole = (8 if layer % 2 else 4) * HIDDEN**2
            left = 1.0 if densities is None else densities[moment][layer]
            layers.append(LayerCost(f, b, w, parameters=round(whole * left) if w else 0))
        moments.append(tuple(layers))
    return tuple(moments)


def pruned(blocks: int, sequence: int, seed: int, moments: int) -> list[list[float]]:
    """Returns the share of weights that the trace's own model leaves in each half.

    The model has normal weights of layers that differ in scale. They are cut at one magnitude over
    all, so that 0, 52, 79, 90 % are gone.
    """
    draw = random.Random(f"{seed} pruning {blocks} {sequence}")
    scales = [math.exp(draw.gauss(0, 0.35)) for _ in range(2 * blocks)]
    shares = [1 / 3 / blocks, 2 / 3 / blocks] * blocks
    out: list[list[float]] = []
    for moment in range(moments):
        wanted = (0.0, 0.52, 0.79, 0.90)[4 * moment // moments]
        low, high = 0.0, 50.0
        for _ in range(80):
            cut = (low + high) / 2
            gone = sum(
                share * math.erf(cut / scale / math.sqrt(2))
                for share, scale in zip(shares, scales, strict=True)
            )
            low, high = (cut, high) if gone < wanted else (low, cut)
        out.append([1 - math.erf(low / scale / math.sqrt(2)) for scale in scales])
    return out


def dense_operations(sequence: int) -> int:
    """Returns the floating-point operations of a dense block's F, per token."""
    return sum(_operations(sequence))


def _operations(sequence: int) -> tuple[int, int]:
    """Returns those of the linears and those of causal attention's pairs."""
    return 24 * HIDDEN**2, 2 * sequence * HIDDEN


def dense(blocks: int, sequence: int) -> Layers:
    """Returns the costs of the half blocks without any technique.

    The unit is a block's F.

    F = 2P + A, B = 2P + 2A, W = 2P. These are products with the P weights, and the A of the
    attention's pairs.
    """
    linear, attention = _operations(sequence)
    unit = linear + attention
    first, second, a = linear / 3 / unit, 2 * linear / 3 / unit, attention / unit
    pair = (
        LayerCost(first + a, first + 2 * a, first, 4 * HIDDEN**2),
        LayerCost(second, second, second, 8 * HIDDEN**2),
    )
    return pair * blocks


def in_blocks(layers: Sequence[LayerCost]) -> Layers:
    pairs = zip(layers[::2], layers[1::2], strict=True)
    return tuple(
        LayerCost(a.f + b.f, a.b + b.b, a.w + b.w, a.parameters + b.parameters) for a, b in pairs
    )


def condensed(moments: Sequence[Layers], middle: Callable[[list[float]], float]) -> Layers:
    """Condenses each layer's costs over the moments, F, B and W by themselves."""
    layers: list[LayerCost] = []
    for column in zip(*moments, strict=True):
        f, b, w = (middle([getattr(x, key) for x in column]) for key in "fbw")
        layers.append(LayerCost(f, b, w, column[0].parameters))
    return tuple(layers)


def in_halves(placement: Partition) -> Partition:
    """Returns a placement of whole blocks as one of half blocks."""
    return Partition(tuple(2 * count for count in placement.counts))


# -- placements ------------------------------------------------------------------------------------


def profile_of(layers: Layers, link: float | tuple[float, ...] = 0.0) -> Profile:
    """Returns the costs as a profile. `link` is the time of a message over each boundary."""
    first = next((i for i, x in enumerate(layers) if x.b or x.w), len(layers) - 1)
    names = tuple(str(i) for i in range(len(layers)))
    return Profile(layers, names, first, comm=link, microbatch=1)


def problem_of(layers: Layers, link: float | tuple[float, ...] = 0.0) -> Problem:
    """Returns the problem of the shortest makespan. `link` as in `profile_of`."""
    return Problem(profile_of(layers, link), Work(Objective.MAKESPAN))


def timeline(
    layers: Layers,
    placement: Partition,
    microbatches: int,
    schedule: str = "zb-h1",
    link: float = 0.0,
) -> Timeline:
    """Simulates a step. `link` is the time of a message."""
    mesh = Mesh(placement.stages, 1, microbatches, 1, schedule)
    return evaluate(problem_of(layers, link), Choice(mesh, placement)).timeline


def perfect(layers: Layers, ranks: int, microbatches: int) -> Timeline:
    """Simulates a step whose ranks all have the same part of all work."""
    f, b, w = (math.fsum(getattr(x, key) for x in layers) / ranks for key in "fbw")
    costs = Costs((StageCost(f, b, w),) * ranks, (0.0,) * (ranks - 1))
    return simulate(make("zb-h1", ranks, microbatches), costs)


def best(
    layers: Layers,
    ranks: int,
    microbatches: int,
    current: Partition | None = None,
    schedule: str = "zb-h1",
    link: float = 0.0,
) -> Partition:
    """Searches the placement with the shortest makespan. `link` is the time of a message."""
    mesh = Mesh(ranks, 1, microbatches, 1, schedule)
    return place(problem_of(layers, link), mesh, current).partition


def bottleneck(layers: Layers, placement: Partition) -> float:
    """Returns the busiest rank's time for one microbatch."""
    return max(
        math.fsum(layers[i].seconds for i in placement.range_of(rank))
        for rank in range(placement.stages)
    )
