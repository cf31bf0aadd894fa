"""Chains on chains: the exact least bottleneck of stages, and its best tie.

Stages are contiguous.

    sums     0 3 5 9 10 16      of the weights, as integers: every float is one over a power of two
    stage s  sums[stop] - sums[start] <= limit[s]

A stage must also fit its memory, and a layer must be left for each stage after it.

The bottleneck is found by bisection between times that placements truly have. It is therefore a
sum of layers and never a number near one. Ties are resolved by dynamic programming. The loops run
compiled, in `_kernels`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple, final

import numpy as np

from dynmo.balance import _kernels as kernels
from dynmo.balance._kernels import FOUND, STUCK, Ints, Memory
from dynmo.cost.layer_cost import LinkCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.schedule.memory import MemoryLimits

Time = int | Fraction


def integer_sums(weights: Sequence[float]) -> list[int]:
    """Exact prefix sums of the weights.

    Every float is an integer over a power of two.
    """
    for layer, weight in enumerate(weights):
        if not math.isfinite(weight) or weight < 0:
            raise PartitionError(
                f"layer {layer} has the weight {weight}; a weight is a number of at least 0"
            )
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = max((below for _, below in ratios), default=1)
    return list(accumulate((above * (unit // below) for above, below in ratios), initial=0))


def enough(layers: int, ranks: int) -> None:
    """Checks that each rank can have a layer."""
    if ranks < 1:
        raise PartitionError(f"a placement on {ranks} ranks; at least 1 is needed")
    if layers < ranks:
        raise PartitionError(f"{ranks} ranks need at least {ranks} layers; the model has {layers}")


def same_layers(have: int, want: int) -> None:
    """Checks that two numbers of layers are equal."""
    if have != want:
        raise PartitionError(
            f"{have} layers where {want} are expected; both must be of the same model"
        )


def tie_unit(largest: int, stages: int) -> int:
    """The step in which loads are counted when ties are compared."""
    if stages * largest * largest < 1 << 62:
        return 1
    bits = (62 - stages.bit_length()) // 2
    return -(-largest // (1 << bits))


def _limbs(values: Sequence[int], limbs: int) -> Ints:
    """Each value as `limbs` limbs of 32 bits, the most significant first."""
    text = b"".join(value.to_bytes(4 * limbs, "big") for value in values)
    return np.frombuffer(text, ">u4").astype(np.int64).reshape(len(values), limbs)


def rank_speeds(speeds: Sequence[float] | None, ranks: int) -> list[Fraction] | None:
    """The speeds as fractions, or None if all are 1."""
    if speeds is None:
        return None
    if len(speeds) != ranks:
        raise PartitionError(f"{len(speeds)} speeds for {ranks} ranks; give one per rank")
    for rank, speed in enumerate(speeds):
        if not math.isfinite(speed) or speed <= 0:
            raise PartitionError(f"rank {rank} has the speed {speed}; a speed is a number over 0")
    return None if all(speed == 1 for speed in speeds) else [Fraction(speed) for speed in speeds]


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


class _Filled(NamedTuple):
    """The result of `greedy`, or of `every` (then with `low`).

    It has a placement if `code` is FOUND, the latest starts, and what each stage was refused.
    """

    code: int
    bounds: Ints
    high: Ints
    low: Ints | None
    rise: Ints


_TRANSITIONS = 2_500_000  # of the search among ties: some milliseconds


@final
class Problem:
    """Weights as exact prefix sums, and the limits of a stage.

    A stage is limited by its time and its memory, and one layer must be left for each stage after
    it.

    A time is in units of the weights' own smallest step, divided by a rank's speed. It is an
    integer while all speeds are 1 and no link counts.
    """

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
        sums = integer_sums(weights)
        # With the smallest possible integers, a small model is compared in one limb, and its ties
        # are compared exactly.
        shared = gcd(*(stop - start for start, stop in pairwise(sums))) or 1
        self.sums = [x // shared for x in sums] if shared > 1 else sums
        self.heaviest = max(stop - start for start, stop in pairwise(self.sums))
        self.speeds = rank_speeds(speeds, ranks)
        self.classes, self.sends = self._sends(weights, links, output_bytes)
        if memory is not None:
            same_layers(len(memory.layers), self.layers)
            if memory.stages != ranks:
                raise PartitionError(
                    f"memory limits for {memory.stages} stages, but {ranks} ranks; "
                    "give one limit per rank"
                )
        self.limbs = max(1, -(-self.sums[-1].bit_length() // 32))
        self.table = _limbs(self.sums, self.limbs)
        self.bytes = memory_tables(memory)

    def _sends(
        self,
        weights: Sequence[float],
        links: Sequence[LinkCost] | None,
        output_bytes: Sequence[int] | None,
    ) -> tuple[Ints, list[list[Fraction]] | None]:
        """The sizes that stages send, and their times.

        Returns:
            classes and sends. classes[e] is the index of the size that a stage sends if it stops at
            e. sends has, for each stage, the time of sending each size.
        """
        if links is None and output_bytes is None:
            return np.zeros(0, np.int64), None
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
        unit = next(
            (
                Fraction(w) / (b - a)
                for w, (a, b) in zip(weights, pairwise(self.sums), strict=True)
                if w
            ),
            Fraction(1),
        )
        sends: list[list[Fraction]] = []
        for boundary, link in enumerate(links):
            seconds = [link.seconds(size) for size in sizes]
            for value in seconds:
                if not math.isfinite(value) or value < 0:
                    raise PartitionError(
                        f"boundary {boundary} takes {value} s; "
                        "a link's time is a number of at least 0"
                    )
            sends.append([Fraction(value) / unit for value in seconds])
        return classes, [*sends, [Fraction(0)] * len(sizes)]

    # -- times and limits --------------------------------------------------------------------------

    def time(self, stage: int, start: int, stop: int) -> Time:
        """Time of a stage."""
        time: Time = self.sums[stop] - self.sums[start]
        if self.speeds is not None:
            time = time / self.speeds[stage]
        if self.sends is not None:
            time = time + self.sends[stage][int(self.classes[stop])]
        return time

    def limits(self, bottleneck: Time) -> list[list[int]]:
        """The largest load within `bottleneck`, per stage and size sent.

        There is one row for all stages if they are alike. A limit is -1 if sending alone takes
        longer.
        """
        total = self.sums[-1]
        if self.speeds is None and self.sends is None:
            return [[min(total, int(bottleneck))]]
        rows: list[list[int]] = []
        for stage in range(self.ranks):
            speed = Fraction(1) if self.speeds is None else self.speeds[stage]
            sends = [Fraction(0)] if self.sends is None else self.sends[stage]
            rows.append(
                [
                    min(total, math.floor((bottleneck - send) * speed))
                    if bottleneck >= send
                    else -1
                    for send in sends
                ]
            )
        return rows

    def _table(self, bottleneck: Time) -> Ints:
        """The limits as limbs: [rows, sizes, limbs]."""
        rows = self.limits(bottleneck)
        flat = _limbs([max(0, x) for row in rows for x in row], self.limbs).reshape(
            len(rows), len(rows[0]), self.limbs
        )
        if self.sends is not None:
            flat[np.array(rows) < 0] = -1
        return flat

    # -- the bottleneck ----------------------------------------------------------------------------

    def least_bottleneck(self) -> Time:
        """The least bottleneck, by bisection between values that placements truly have.

        A success lowers `high` to the time of the placement found. A failure raises `low` to the
        least time at which some stage could take one layer more (Pinar and Aykanat's exact
        bisection).
        """
        low: Time
        high: Time
        total = self.sums[-1]
        if self.speeds is None:
            low, high = max(self.heaviest, -(-total // self.ranks)), total
        else:
            low = max(self.heaviest / max(self.speeds), total / sum(self.speeds, Fraction()))
            high = total / min(self.speeds)
        if self.sends is not None:
            high += max(map(max, self.sends))
        feasible, value = self.probe(high)
        if not feasible:
            raise NoRoomError(self.no_memory())
        high = value
        trial = min(
            high, low + (self.heaviest if self.speeds is None else self.heaviest / min(self.speeds))
        )
        while low < high:
            feasible, value = self.probe(trial)
            low, high = (low, value) if feasible else (value, high)
            both = low + high
            trial = both // 2 if isinstance(both, int) else both / 2
        return high

    def probe(self, bottleneck: Time) -> tuple[bool, Time]:
        """Tries one bottleneck.

        Returns:
            (True, the largest time of a placement within `bottleneck`), or (False, the least
            bottleneck worth trying next).
        """
        filled = self._fill(self._table(bottleneck))
        if filled.code == FOUND:
            ends: list[int] = filled.bounds.tolist()
            if self.speeds is None and self.sends is None:
                return True, max(self.sums[b] - self.sums[a] for a, b in pairwise(ends))
            return True, max(self.time(stage, a, b) for stage, (a, b) in enumerate(pairwise(ends)))
        steps: list[list[list[int]]] = filled.rise.tolist()
        beyond: Time = (
            self.sums[-1] + 1 if self.speeds is None else self.sums[-1] / min(self.speeds) + 1
        )
        if self.sends is not None:
            beyond += max(map(max, self.sends))
        known = min(
            (self.time(stage, a, b) for stage, row in enumerate(steps) for a, b in row if b >= 0),
            default=beyond,
        )
        return False, known if filled.low is None else min(
            known, self._earlier(filled.low.tolist(), beyond)
        )

    def _earlier(self, low: list[int], beyond: Time) -> Time:
        """The least bottleneck at which some stage may start earlier than low[s]."""
        least = beyond
        for stage, (start, stop) in enumerate(pairwise(low)):
            if start > stage and self._fits(stage, start - 1, stop):
                time = Fraction(self.sums[stop] - self.sums[start - 1]) / (
                    1 if self.speeds is None else self.speeds[stage]
                )
                least = min(least, time if self.sends is None else time + min(self.sends[stage]))
        return math.ceil(least) if isinstance(beyond, int) else least

    def _fill(self, limits: Ints) -> _Filled:
        """Uses `greedy` if that is enough, else `every`."""
        bounds, high = np.zeros(self.ranks + 1, np.int64), np.zeros(self.ranks + 1, np.int64)
        rise = np.full((self.ranks, limits.shape[1], 2), -1, np.int64)
        if limits.shape[1] == 1:
            code, seen = kernels.greedy(self.table, limits, self.bytes, self.ranks, bounds, rise)
            if code != STUCK:
                return _Filled(code, bounds, bounds, None, rise[:seen])
        low = self._floors(limits)
        code, seen = kernels.every(
            self.table, limits, self.classes, self.bytes, low, high, bounds, rise
        )
        return _Filled(code, bounds, high, low, rise[:seen])

    def _floors(self, limits: Ints) -> Ints:
        low = np.zeros(self.ranks + 1, np.int64)
        kernels.floors(self.table, limits, self.bytes, self.ranks, low)
        return low

    # -- the best of the ties ----------------------------------------------------------------------

    def best_tie(
        self, bottleneck: Time, current: Sequence[int] | None, move_bytes: Sequence[int]
    ) -> list[int]:
        """The bounds of the best placement with no time above `bottleneck`.

        Uses dynamic programming over (stage, end).
        """
        limits = self._table(bottleneck)
        low, high = self._windows(limits, current)
        offset = np.concatenate(([0], np.cumsum(np.maximum(0, high - low + 1))))
        own = np.zeros((self.ranks, 2), np.int64)
        if current is not None:
            both = min(self.ranks, len(current) - 1)
            own[:both, 0], own[:both, 1] = current[:both], current[1 : both + 1]
        unit = -(-sum(move_bytes) // (1 << 62)) or 1  # as large as an int64 takes
        sizes = np.array([0, *accumulate(size // unit for size in move_bytes)], np.int64)
        bounds = np.zeros(self.ranks + 1, np.int64)
        reached = kernels.best_tie(
            self.table,
            limits,
            self.classes,
            self.bytes,
            (low, high, offset),
            (own, sizes),
            self._rounded(limits, bottleneck),
            bounds,
        )
        assert reached, "the bottleneck was found, but no placement with it"
        return bounds.tolist()

    def _windows(self, limits: Ints, current: Sequence[int] | None) -> tuple[Ints, Ints]:
        """The first and the last layer that each stage may start with.

        If these windows are too large to search, they are narrowed around a placement near
        `current`, or near equal shares.
        """
        filled = self._fill(limits)
        low, high = self._floors(limits), filled.high
        low[0] = 0
        width = high - low + 1
        if (
            int((width[:-1] * np.minimum(width[1:], 2 * np.diff(filled.bounds))).sum())
            <= _TRANSITIONS
        ):
            return low, high
        wanted = self._even() if current is None or len(current) != self.ranks + 1 else current
        guide = np.zeros(self.ranks + 1, np.int64)
        if limits.shape[1] > 1 or not kernels.near(
            self.table, limits, self.bytes, low, np.array(wanted, np.int64), guide
        ):
            guide = filled.bounds
        half = int(math.sqrt(_TRANSITIONS / self.ranks) / 2)
        return np.maximum(low, guide - half), np.minimum(high, guide + half)

    def extremes(self, bottleneck: Time) -> list[list[int]]:
        """Placements filled from the front, and from the back.

        If memory makes a stage stop short, one of them may not exist.
        """
        limits = self._table(bottleneck)
        both: list[list[int]] = [
            self._fill(limits).high.tolist(),
            [0, *self._floors(limits)[1:].tolist()],
        ]
        return [
            x
            for x in both
            if all(
                a < b and self.time(s, a, b) <= bottleneck and self._fits(s, a, b)
                for s, (a, b) in enumerate(pairwise(x))
            )
        ]

    def _fits(self, stage: int, start: int, stop: int) -> bool:
        return self.memory is None or self.memory.fits(stage, start, stop)

    def _even(self) -> list[int]:
        """The boundaries nearest to equal shares of the load."""
        total = self.sums[-1]
        return [
            min(self.layers, bisect_left(self.sums, total * stage // self.ranks))
            for stage in range(self.ranks)
        ] + [self.layers]

    def _rounded(self, limits: Ints, bottleneck: Time) -> tuple[Ints, Ints, Ints]:
        """Prefix sums of the weights, links' times and slowness, in coarse whole units.

        The units are so coarse that the sum of all squared times is an int64.
        """
        slowest = Fraction(1) if self.speeds is None else min(self.speeds)
        largest = max(math.floor(bottleneck * slowest), *map(max, self.limits(bottleneck)))
        unit = tie_unit(largest, self.ranks)
        loads = np.array(
            [0, *accumulate((b - a) // unit for a, b in pairwise(self.sums))], np.int64
        )
        slowness = np.full(self.ranks, 1 << 30, np.int64)
        if self.speeds is not None:
            slowness[:] = [round((1 << 30) * slowest / speed) for speed in self.speeds]
        extra = np.zeros((self.ranks, limits.shape[1]), np.int64)
        if self.sends is not None:
            extra[:] = [
                [math.floor(min(send, bottleneck) * slowest / unit) for send in row]
                for row in self.sends
            ]
        return loads, extra, slowness

    def no_memory(self) -> str:
        """Says why no placement fits.

        The cause is found by filling the stages in order as far as memory goes.
        """
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
