"""Where the layers sit: contiguous ranges, one per stage (here a stage is a rank), and the exact way to choose them.

    counts (3, 2, 3)   layers  0 1 2 | 3 4 | 5 6 7
                       stage     0   |  1  |   2         bounds (0, 3, 5, 8)

`exact` solves chains-on-chains partitioning: the least largest stage load over all contiguous placements (DynMo, section 3.3, without
the faults of the DeepSpeed utility it builds on: empty stages, an absolute tolerance, an endless loop when layers are fewer than
ranks). Loads are compared as exact integers, so the bottleneck is a sum of layers, never a number near one, and a tie is a tie.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, final

from dynmo.costs import LayerCost
from dynmo.errors import PartitionError
from dynmo.memory import MemoryLimits

Cost = Literal["time", "parameters"]


@dataclass(frozen=True)
class Partition:
    """Layers per stage, in stage order. Raises PartitionError unless there is a stage and every stage has a layer."""

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts:
            raise PartitionError("a placement without stages; give at least one count of layers")
        for stage, count in enumerate(self.counts):
            if count < 1:
                raise PartitionError(f"stage {stage} of the placement {self.counts} has {count} layers; every stage needs at least 1")

    @classmethod
    def from_bounds(cls, bounds: Sequence[int]) -> Partition:
        return cls(tuple(stop - start for start, stop in pairwise(bounds)))

    @property
    def layers(self) -> int:
        return self.bounds[-1]

    @property
    def ranks(self) -> int:
        return len(self.counts)

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """First layer of each stage, then the number of layers: stage s holds bounds[s] .. bounds[s + 1] - 1."""
        return tuple(accumulate(self.counts, initial=0))

    def range_of(self, stage: int) -> range:
        """The layers of `stage`."""
        if not 0 <= stage < self.ranks:
            raise PartitionError(f"stage {stage} of a placement on {self.ranks} stages")
        return range(self.bounds[stage], self.bounds[stage + 1])

    def owner(self, layer: int) -> int:
        """The stage that holds `layer`."""
        if not 0 <= layer < self.layers:
            raise PartitionError(f"layer {layer} of a placement of {self.layers} layers")
        return bisect_right(self.bounds, layer) - 1


class Move(NamedTuple):
    """`layer` goes from stage `source` to stage `target`."""

    layer: int
    source: int
    target: int


def moves(old: Partition, new: Partition) -> tuple[Move, ...]:
    """The layers whose stage changes, in layer order; the numbers of ranks may differ, the layers may not (PartitionError)."""
    _same_layers(old.layers, new.layers)
    both = ((layer, old.owner(layer), new.owner(layer)) for layer in range(old.layers))
    return tuple(Move(layer, source, target) for layer, source, target in both if source != target)


def imbalance(loads: Sequence[float]) -> float:
    """DynMo's dL = (max - min) / mean (section 2.2); 0 where nothing is loaded. Raises PartitionError for no loads at all."""
    if not loads:
        raise PartitionError("the imbalance of no loads; give one load per stage")
    mean = math.fsum(loads) / len(loads)
    return (max(loads) - min(loads)) / mean if mean else 0.0


def weigh(layers: Sequence[LayerCost], cost: str) -> tuple[float, ...]:
    """One weight per layer: "time" is F + B + W in seconds, "parameters" their number.

    By parameters a frozen layer weighs as much as a trained one: that is the baseline's own fault, and it is kept.
    """
    if cost == "time":
        return tuple(layer.seconds for layer in layers)
    if cost == "parameters":
        return tuple(layer.parameters for layer in layers)
    raise PartitionError(f"unknown cost {cost!r}; choose one of time, parameters")


def stage_loads(weights: Sequence[float], partition: Partition) -> tuple[float, ...]:
    """The sum of the weights of each stage, correctly rounded."""
    _same_layers(len(weights), partition.layers)
    return tuple(math.fsum(weights[start:stop]) for start, stop in pairwise(partition.bounds))


def uniform(layers: int, ranks: int) -> Partition:
    """As many layers on every stage; where they do not divide, the first stages take one more (DeepSpeed's order)."""
    _enough(layers, ranks)
    each, more = divmod(layers, ranks)
    return Partition((each + 1,) * more + (each,) * (ranks - more))


def exact(
    weights: Sequence[float],
    ranks: int,
    *,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    move_bytes: Sequence[int] | None = None,
) -> Partition:
    """The placement whose largest stage load is least, among all that fit `memory` and leave no stage empty.

    Of several, the one that moves the fewest `move_bytes` (per layer; without them, the fewest layers) away from `current`; then the one
    with the least sum of squared loads, then of squared counts; then the one whose last boundaries are nearest the front. Raises
    PartitionError where there are fewer layers than ranks, a weight is negative or not finite, or no placement fits `memory`.
    """
    problem = _Problem(weights, ranks, memory)
    if current is not None:
        _same_layers(current.layers, problem.layers)
    if move_bytes is not None:
        _same_layers(len(move_bytes), problem.layers)
    bottleneck = problem.least_bottleneck()
    return Partition.from_bounds(problem.best_tie(bottleneck, current, [1] * problem.layers if move_bytes is None else move_bytes))


def integer_sums(weights: Sequence[float]) -> list[int]:
    """Prefix sums of the weights (one longer than they), exact: every float is an integer over a power of two."""
    for layer, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise PartitionError(f"layer {layer} has the weight {weight}; a weight is a number of at least 0")
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = max((below for _, below in ratios), default=1)
    return list(accumulate((above * (unit // below) for above, below in ratios), initial=0))


def _enough(layers: int, ranks: int) -> None:
    if ranks < 1:
        raise PartitionError(f"a placement on {ranks} ranks; at least 1 is needed")
    if layers < ranks:
        raise PartitionError(f"{ranks} ranks need at least {ranks} layers; the model has {layers}")


def _same_layers(have: int, want: int) -> None:
    if have != want:
        raise PartitionError(f"{have} layers where {want} are expected; both must be of the same model")


_States = dict[int, tuple[tuple[int, int, int], int]]


@final
class _Problem:
    """Weights as exact prefix sums, and what bounds a stage: its load, its memory, and one layer left for each stage after it."""

    def __init__(self, weights: Sequence[float], ranks: int, memory: MemoryLimits | None) -> None:
        self.layers, self.ranks, self.memory = len(weights), ranks, memory
        _enough(self.layers, ranks)
        self.sums = integer_sums(weights)
        if memory is not None:
            _same_layers(len(memory.layers), self.layers)
            if memory.stages != ranks:
                raise PartitionError(f"memory limits for {memory.stages} stages, but {ranks} ranks; give one limit per rank")

    def room(self, stage: int, start: int) -> int:
        """The farthest stop of `stage` whatever its load."""
        last = self.layers - (self.ranks - 1 - stage)
        return last if self.memory is None else min(last, self.memory.reach(stage, start))

    def stop(self, stage: int, start: int, bottleneck: int) -> int:
        """The farthest stop of `stage`; `start` itself when not even one layer fits."""
        return bisect_right(self.sums, self.sums[start] + bottleneck, start, self.room(stage, start) + 1) - 1

    def least_bottleneck(self) -> int:
        """Bisection between values that placements truly have: a success lowers `high` to the load of what was found, a failure
        raises `low` to the least load at which some stage could take one layer more (Pinar and Aykanat's exact bisection)."""
        total, heaviest = self.sums[-1], max(stop - start for start, stop in pairwise(self.sums))
        low = max(heaviest, -(-total // self.ranks))
        found, high = self.probe(total)
        if not found:
            raise PartitionError(self.no_memory())
        trial = min(high, low + heaviest)  # enough wherever memory is no matter, and near the answer
        while low < high:
            found, value = self.probe(trial)
            low, high = (low, value) if found else (value, high)
            trial = (low + high) // 2
        return high

    def probe(self, bottleneck: int) -> tuple[bool, int]:
        """(True, the largest load of a placement within `bottleneck`), or (False, the least bottleneck worth trying next)."""
        found, value, stuck = self.sweep(bottleneck, every=False)
        return self.sweep(bottleneck, every=True)[:2] if stuck else (found, value)

    def sweep(self, bottleneck: int, every: bool) -> tuple[bool, int, bool]:
        """Fills the stages in order, each as far as it goes. What only that way reaches, only that way can end the model: unless a stage
        cannot hold the very layer it should start with (it is `stuck`) and an earlier stage must stop short. Then `every` stop is tried.
        """
        starts = [0]
        before: list[list[int]] = []
        rise = self.sums[-1] + 1
        for stage in range(self.ranks):
            ends: list[int] = []
            for start in starts:
                room, stop = self.room(stage, start), self.stop(stage, start, bottleneck)
                if stop < room:
                    rise = min(rise, self.sums[stop + 1] - self.sums[start])
                if every:  # stops grow with starts, so each end is listed once and in order
                    ends.extend(range(max(start, ends[-1] if ends else 0) + 1, stop + 1))
                elif stop > start:
                    ends.append(stop)
            if not ends:
                return False, rise, True
            before.append(starts)
            starts = ends
        if starts[-1] != self.layers:
            return False, rise, False
        end, largest = self.layers, 0
        for stage in reversed(range(self.ranks)):
            start = next(a for a in reversed(before[stage]) if a < end <= self.stop(stage, a, bottleneck))
            largest, end = max(largest, self.sums[end] - self.sums[start]), start
        return True, largest, False

    def best_tie(self, bottleneck: int, current: Partition | None, move_bytes: Sequence[int]) -> list[int]:
        """The bounds of the best placement with no load above `bottleneck`: dynamic programming over (stage, end)."""
        sums, sizes = self.sums, list(accumulate(move_bytes, initial=0))
        # Before floors[s] stage s cannot start: the stages from there on would carry too much.
        floors = [self.layers]
        for _ in range(self.ranks):
            floors.append(bisect_left(sums, sums[floors[-1]] - bottleneck))
        floors.reverse()
        # Per stage, end -> (what is minimised, start); a strict comparison keeps the earliest start.
        states: _States = {0: ((0, 0, 0), 0)}
        table: list[_States] = []
        for stage in range(self.ranks):
            own = current.range_of(stage) if current is not None and stage < current.ranks else range(0)
            reached: _States = {}
            for start, ((moved, squares, counts), _) in states.items():
                for end in range(max(start + 1, floors[stage + 1]), self.stop(stage, start, bottleneck) + 1):
                    kept = sizes[min(end, own.stop)] - sizes[max(start, own.start)]
                    load, count = sums[end] - sums[start], end - start
                    key = (moved - max(0, kept), squares + load * load, counts + count * count)
                    if end not in reached or key < reached[end][0]:
                        reached[end] = (key, start)
            table.append(reached)
            states = reached  # in order of ends, for stops grow with starts
        bounds = [self.layers]
        for reached in reversed(table):
            bounds.append(reached[bounds[-1]][1])
        return bounds[::-1]

    def no_memory(self) -> str:
        """Why no placement fits, found by filling the stages in order as far as memory goes."""
        memory = self.memory
        assert memory is not None, "without memory limits a placement always exists"
        remedy = "use more ranks, a smaller microbatch or a schedule that keeps less"
        for layer in range(self.layers):
            if not any(memory.fits(stage, layer, layer + 1) for stage in range(self.ranks)):
                stage = max(range(self.ranks), key=lambda s: memory.limits[s] - memory.need(s, layer, layer + 1))
                need, limit = memory.need(stage, layer, layer + 1), memory.limits[stage]
                return (
                    f"layer {layer} fits no stage: alone on stage {stage} it needs {need} bytes, the limit there is {limit}; "
                    "use a larger limit, a smaller microbatch or a schedule that keeps less"
                )
        starts = [0]
        for stage in range(self.ranks):
            ends = {end for start in starts for end in range(start + 1, self.room(stage, start) + 1)}
            last = stage == self.ranks - 1
            if not ends or (last and self.layers not in ends):
                start = starts[-1]
                stop = self.layers if last else start + 1
                held = f"layers {start}..{stop - 1}" if stop > start + 1 else f"layer {start}"
                return (
                    f"stage {stage} cannot hold {held} once the stages before it are full: "
                    f"{memory.need(stage, start, stop)} bytes needed, the limit is {memory.limits[stage]}; {remedy}"
                )
            starts = sorted(ends)
        raise AssertionError("memory was said not to suffice, but it does")
