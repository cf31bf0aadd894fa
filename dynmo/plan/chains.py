"""Chains on chains: the exact least bottleneck of stages, and its best tie.

Stages are contiguous.

    sums     0 3 5 9 10 16      of the weights, as integers
    stage s  (sums[stop] - sums[start]) / speed + time of sending  <=  bottleneck

A stage must also fit its memory, and a layer must be left for each stage after it.

The bottleneck is found by bisection between times that placements truly have. It is therefore the
time of a stage and never a number near one. Ties are resolved by dynamic programming. The loops run
compiled, in `_kernels`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import final

import numpy as np

from dynmo.cost.layer_cost import LinkCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.plan import _kernels as kernels
from dynmo.plan._kernels import FOUND, STUCK, Floats, Ints, Memory
from dynmo.schedule.memory import MemoryLimits

_BITS = 52  # of all weights together, so that loads are exact in a float


def integer_sums(weights: Sequence[float]) -> list[int]:
    """Prefix sums of the weights, as integers.

    They are exact if their common unit is at least 2^-52 of their sum. If not, each weight counts
    in units of 2^-52 of the sum.
    """
    for layer, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise PartitionError(
                f"layer {layer} has the weight {weight}; a weight is a number of at least 0"
            )
    # Every float is an integer over a power of two.
    ratios = [weight.as_integer_ratio() for weight in weights]
    below = max((denominator for _, denominator in ratios), default=1)
    parts = [above * (below // denominator) for above, denominator in ratios]
    unit, total = math.gcd(*parts) or 1, sum(parts)
    if total // unit >= 1 << _BITS:
        unit = -(-total // (1 << _BITS))
    return list(accumulate((part // unit for part in parts), initial=0))


def enough(layers: int, ranks: int) -> None:
    """Checks that each rank can have a layer."""
    if ranks < 1:
        raise PartitionError(f"a placement on {ranks} ranks; at least 1 is needed")
    if layers < ranks:
        raise PartitionError(f"{ranks} ranks need at least {ranks} layers; the model has {layers}")


def same_layers(have: int, want: int) -> None:
    if have != want:
        raise PartitionError(
            f"{have} layers where {want} are expected; both must be of the same model"
        )


def tie_unit(largest: int, stages: int) -> int:
    if stages * largest * largest < 1 << 62:
        return 1
    bits = (62 - stages.bit_length()) // 2
    return -(-largest // (1 << bits))


def rank_speeds(speeds: Sequence[float] | None, ranks: int) -> Floats:
    """Without speeds they are all 1."""
    if speeds is None:
        return np.ones(ranks)
    if len(speeds) != ranks:
        raise PartitionError(f"{len(speeds)} speeds for {ranks} ranks; give one per rank")
    for rank, speed in enumerate(speeds):
        if not math.isfinite(speed) or speed <= 0:
            raise PartitionError(f"rank {rank} has the speed {speed}; a speed is a number over 0")
    return np.array(speeds, np.float64)


def memory_tables(memory: MemoryLimits | None) -> Memory:
    """The limits as `_kernels` takes them."""
    if memory is None:
        return (
            np.zeros((3, 1), np.int64),
            np.zeros((0, 2), np.int64),
            np.zeros(1, np.int64),
            np.zeros(0, np.int64),
        )
    rows = [pairs or ((0, 0),) for pairs in memory.resident]
    flat = [pair for pairs in rows for pair in pairs]
    kinds = [
        [0, *accumulate(x.static_bytes for x in memory.layers)],
        [0, *accumulate(x.activation_bytes for x in memory.layers)],
        [0, *accumulate(x.stash_bytes for x in memory.layers)],
    ]
    largest = kinds[0][-1] + max(
        forward * kinds[1][-1] + stashed * kinds[2][-1] for forward, stashed in flat
    )
    if largest >= 1 << 62:
        raise PartitionError(
            f"the layers would hold {largest} bytes; "
            "sizes are in bytes, and no machine has 2^62 of them"
        )
    caps = [max(-1, min(limit, 1 << 62)) for limit in memory.limits]
    starts = [0, *accumulate(map(len, rows))]
    return (
        np.array(kinds, np.int64),
        np.array(flat, np.int64),
        np.array(starts, np.int64),
        np.array(caps, np.int64),
    )


_TRANSITIONS = 2_500_000  # of the search among ties: some milliseconds


@final
class Problem:
    """Weights, and the limits of stages. A time is in units of the sums, for a speed of 1."""

    def __init__(
        self,
        weights: Sequence[float],
        ranks: int,
        memory: MemoryLimits | None = None,
        speeds: Sequence[float] | None = None,
        links: Sequence[LinkCost] | None = None,
        output_bytes: Sequence[int] | None = None,
    ) -> None:
        self.layers, self.ranks, self.memory = len(weights), ranks, memory
        enough(self.layers, ranks)
        self.sums = np.array(integer_sums(weights), np.int64)
        self.speeds = rank_speeds(speeds, ranks)
        self.classes, self.sends = self._sends(weights, links, output_bytes)
        if memory is not None:
            same_layers(len(memory.layers), self.layers)
            if memory.stages != ranks:
                raise PartitionError(
                    f"memory limits for {memory.stages} stages, but {ranks} ranks; "
                    "give one limit per rank"
                )
        self.times = self.sums, self.speeds, self.sends, self.classes
        self.bytes = memory_tables(memory)

    def _sends(
        self,
        weights: Sequence[float],
        links: Sequence[LinkCost] | None,
        output_bytes: Sequence[int] | None,
    ) -> tuple[Ints, Floats]:
        """classes[e] is the index of the size that a stage sends if it stops at e.

        sends has the time of sending each size: [stage, size].
        """
        if links is None and output_bytes is None:
            return np.zeros(self.layers + 1, np.int64), np.zeros((self.ranks, 1))
        if links is None or output_bytes is None:
            raise PartitionError(
                "a link's time needs both the links and output_bytes; give both or neither"
            )
        if len(links) != self.ranks - 1:
            raise PartitionError(
                f"{len(links)} links for {self.ranks} ranks; "
                f"give {self.ranks - 1}, one per boundary"
            )
        same_layers(len(output_bytes), self.layers)
        sizes = sorted(set(output_bytes[:-1]) or {0})
        known = {size: index for index, size in enumerate(sizes)}
        classes = np.array([0, *(known.get(size, 0) for size in output_bytes)], np.int64)
        unit = math.fsum(weights) / int(self.sums[-1]) if self.sums[-1] else 1.0
        sends = np.zeros((self.ranks, len(sizes)))
        for boundary, link in enumerate(links):
            seconds = [link.seconds(size) for size in sizes]
            for value in seconds:
                if not math.isfinite(value) or value < 0:
                    raise PartitionError(
                        f"boundary {boundary} takes {value} s; "
                        "a link's time is a number of at least 0"
                    )
            sends[boundary] = np.array(seconds) / unit
        return classes, sends

    # -- the bottleneck ----------------------------------------------------------------------------

    def stage_times(self, bounds: Ints) -> Floats:
        loads = np.diff(self.sums[bounds])
        return loads / self.speeds + self.sends[np.arange(self.ranks), self.classes[bounds[1:]]]

    def least_bottleneck(self) -> float:
        """The least bottleneck, by bisection between values that placements truly have.

        A success lowers `high` to the time of the placement found. A failure raises `low` to the
        least time at which some stage could take one layer more (Pinar and Aykanat's exact
        bisection).
        """
        total, heaviest = int(self.sums[-1]), int(np.diff(self.sums).max())
        low = max(heaviest / self.speeds.max(), total / self.speeds.sum())
        high = total / self.speeds.min() + self.sends.max()
        feasible, high = self.probe(high)
        if not feasible:
            raise NoRoomError(self.no_memory())
        trial = min(high, low + heaviest / self.speeds.min())
        while low < high:
            feasible, value = self.probe(trial)
            low, high = (low, value) if feasible else (value, high)
            middle = (low + high) / 2
            trial = middle if low < middle < high else low
        return high

    def probe(self, bottleneck: float) -> tuple[bool, float]:
        """Tries one bottleneck.

        Returns (True, the largest time of a placement within it), or (False, the next to try).
        """
        found, rise, bounds, _ = self._fill(bottleneck)
        return (True, float(self.stage_times(bounds).max())) if found else (False, rise)

    def _fill(self, bottleneck: float) -> tuple[bool, float, Ints, Ints]:
        """Uses `greedy` if that is enough, else `every`.

        Returns whether there is a placement, the least bottleneck worth trying next, the placement,
        and the latest starts.
        """
        bounds = np.zeros(self.ranks + 1, np.int64)
        if self.sends.shape[1] == 1:
            code, rise = kernels.greedy(self.times, self.bytes, bottleneck, bounds)
            if code != STUCK:
                return code == FOUND, rise, bounds, bounds
        high = np.zeros(self.ranks + 1, np.int64)
        low = self._floors(bottleneck)
        code, rise = kernels.every(self.times, self.bytes, bottleneck, low, high, bounds)
        return code == FOUND, rise, bounds, high

    def _floors(self, bottleneck: float) -> Ints:
        low = np.zeros(self.ranks + 1, np.int64)
        kernels.floors(self.times, self.bytes, bottleneck, low)
        return low

    # -- the best of the ties ----------------------------------------------------------------------

    def best_tie(
        self, bottleneck: float, current: Sequence[int] | None, move_bytes: Sequence[int]
    ) -> list[int]:
        """The bounds of the best placement with no time above `bottleneck`."""
        low, high = self._windows(bottleneck, current)
        offset = np.concatenate(([0], np.cumsum(np.maximum(0, high - low + 1))))
        own = np.zeros((self.ranks, 2), np.int64)
        if current is not None:
            both = min(self.ranks, len(current) - 1)
            own[:both, 0], own[:both, 1] = current[:both], current[1 : both + 1]
        unit = -(-sum(move_bytes) // (1 << 62)) or 1  # as large as an int64 takes
        sizes = np.array([0, *accumulate(size // unit for size in move_bytes)], np.int64)
        bounds = np.zeros(self.ranks + 1, np.int64)
        reached = kernels.best_tie(
            self.times,
            self.bytes,
            bottleneck,
            (low, high, offset),
            (own, sizes),
            self._rounded(bottleneck),
            bounds,
        )
        assert reached, "the bottleneck was found, but no placement with it"
        return bounds.tolist()

    def _windows(self, bottleneck: float, current: Sequence[int] | None) -> tuple[Ints, Ints]:
        """The first and the last layer that each stage may start with.

        If these windows are too large to search, they are narrowed around a placement near
        `current`, or near equal shares.
        """
        _, _, bounds, high = self._fill(bottleneck)
        low = self._floors(bottleneck)
        low[0] = 0
        width = high - low + 1
        if int((width[:-1] * np.minimum(width[1:], 2 * np.diff(bounds))).sum()) <= _TRANSITIONS:
            return low, high
        wanted = self._even() if current is None or len(current) != self.ranks + 1 else current
        guide = np.zeros(self.ranks + 1, np.int64)
        if self.sends.shape[1] > 1 or not kernels.near(
            self.times, self.bytes, bottleneck, low, np.array(wanted, np.int64), guide
        ):
            guide = bounds
        half = int(math.sqrt(_TRANSITIONS / self.ranks) / 2)
        return np.maximum(low, guide - half), np.minimum(high, guide + half)

    def extremes(self, bottleneck: float) -> list[list[int]]:
        """Placements filled from the front, and from the back, if memory allows them."""
        low = self._floors(bottleneck)
        low[0] = 0
        return [
            x.tolist()
            for x in (self._fill(bottleneck)[3], low)
            if (np.diff(x) > 0).all()
            and (self.stage_times(x) <= bottleneck).all()
            and (
                self.memory is None
                or all(self.memory.fits(s, a, b) for s, (a, b) in enumerate(pairwise(x.tolist())))
            )
        ]

    def _even(self) -> list[int]:
        """The boundaries nearest to equal shares of the load."""
        total = int(self.sums[-1])
        return [
            min(self.layers, bisect_left(self.sums, total * stage // self.ranks))
            for stage in range(self.ranks)
        ] + [self.layers]

    def _rounded(self, bottleneck: float) -> tuple[Ints, Ints, Ints]:
        """Prefix sums of the weights, times of sending and slowness, in coarse whole units.

        The units are so coarse that the sum of all squared times is an int64.
        """
        slowest = self.speeds.min()
        within = (bottleneck - self.sends) * self.speeds[:, None]  # the largest loads
        largest = max(bottleneck * slowest, min(float(self.sums[-1]), within.max()))
        unit = tie_unit(int(largest), self.ranks)
        loads = np.concatenate(([0], np.cumsum(np.diff(self.sums) // unit)))
        extra = np.floor(np.minimum(self.sends, bottleneck) * slowest / unit).astype(np.int64)
        slowness = ((1 << 30) * slowest / self.speeds).round().astype(np.int64)
        return loads, extra, slowness

    def no_memory(self) -> str:
        """Says why no placement fits, by filling the stages in order as far as memory goes."""
        memory = self.memory
        assert memory is not None, "without memory limits a placement always exists"
        remedy = "use more ranks, a smaller microbatch or a schedule that keeps less"
        for layer in range(self.layers):
            if not any(memory.fits(stage, layer, layer + 1) for stage in range(self.ranks)):
                stage = max(
                    range(self.ranks),
                    key=lambda s: memory.limits[s] - memory.need(s, layer, layer + 1),
                )
                need, limit = memory.need(stage, layer, layer + 1), memory.limits[stage]
                return (
                    f"layer {layer} fits no stage: alone on stage {stage} it needs {need} bytes, "
                    f"the limit there is {limit}; "
                    "use a larger limit, a smaller microbatch or a schedule that keeps less"
                )
        starts = [0]
        for stage in range(self.ranks):
            last, ends = stage == self.ranks - 1, list[int]()
            for begin in starts:  # stops grow with starts, so each end is listed once and in order
                room = min(self.layers - (self.ranks - 1 - stage), memory.reach(stage, begin))
                ends.extend(range(max(begin, ends[-1] if ends else 0) + 1, room + 1))
            if not ends or (last and self.layers not in ends):
                start = starts[-1]
                stop = self.layers if last else start + 1
                held = f"layers {start}..{stop - 1}" if stop > start + 1 else f"layer {start}"
                return (
                    f"stage {stage} cannot hold {held} once the stages before it are full: "
                    f"{memory.need(stage, start, stop)} bytes needed, the limit is "
                    f"{memory.limits[stage]}; {remedy}"
                )
            starts = ends
        raise AssertionError("memory was said not to suffice, but it does")
