"""The least bottleneck of contiguous stages: where searches start.

    sums     0 3 5 9 10 16      of the weights, as integers
    stage s  (sums[stop] - sums[start]) / speed + time of sending  <=  bottleneck

A stage must also fit its memory, and a layer must be left for each stage after it. The bottleneck
is found by bisection between times that placements truly have. It is therefore the time of a stage
and never a number near one. The loops run compiled, in `_kernels`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import final

import numpy as np

from dynmo.cost.layer_cost import LinkCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.plan import _kernels as kernels
from dynmo.plan._kernels import Bytes, Floats, Ints, Memory
from dynmo.plan.partition import Partition, enough
from dynmo.schedule.memory import MemoryLimits

_BITS = 52  # of all weights together, so that loads are exact in a float
_TRANSITIONS = 2_500_000  # of the search for even stages: some milliseconds


def exact(
    weights: Sequence[float],
    ranks: int,
    *,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    speeds: Sequence[float] | None = None,
    links: Sequence[LinkCost] | None = None,
    output_bytes: Sequence[int] = (),
) -> Partition:
    """Places contiguous layers so that the largest stage time is least (DynMo, section 3.3).

    A stage's time is its load divided by its rank's speed, plus the time of sending its output.
    Sending takes links[s].seconds(output_bytes of its last layer). The last stage sends nothing.
    This is DynMo's reading of a slow network (E.1): the work of A and the transfer after it should
    equal the work of B.

    Many placements have the least bottleneck. The one whose boundaries are nearest to those of
    `current` is returned, which is `current` itself if it is one of them. The last boundary is
    chosen first. Without `current` it is the evenest one: the sum of its stages' squared times is
    the least.

    Weights that are not small integers count in units of 2^-52 of their sum.

    Raises:
        PartitionError: There are fewer layers than ranks, or no placement fits `memory`.
    """
    chain = Chain(weights, ranks, memory, speeds, links, output_bytes)
    return chain.placed(chain.least(), chain.wanted(current))


def ties(
    weights: Sequence[float],
    ranks: int,
    *,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    speeds: Sequence[float] | None = None,
) -> list[Partition]:
    """Some of the placements with the least largest stage time.

    The first is nearest to `current`, as of `exact`. The others are the evenest one, one filled
    from the front, and one from the back.
    """
    chain, layers = Chain(weights, ranks, memory, speeds), len(weights)
    bottleneck = chain.least()
    wanted = (chain.wanted(current), None, (layers,) * (ranks + 1), (0,) * (ranks + 1))
    return [chain.placed(bottleneck, x) for x in wanted]


def integer_sums(weights: Sequence[float]) -> list[int]:
    """Prefix sums of the weights, as integers.

    They are exact if their common unit is at least 2^-52 of their sum. If not, each weight counts
    in units of 2^-52 of the sum.
    """
    assert all(0 <= weight < math.inf for weight in weights)
    # Every float is an integer over a power of two.
    ratios = [weight.as_integer_ratio() for weight in weights]
    below = max((denominator for _, denominator in ratios), default=1)
    parts = [above * (below // denominator) for above, denominator in ratios]
    unit, total = math.gcd(*parts) or 1, sum(parts)
    if total // unit >= 1 << _BITS:
        unit = -(-total // (1 << _BITS))
    return list(accumulate((part // unit for part in parts), initial=0))


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


def memory_tables(memory: MemoryLimits | None, layers: int, stages: int) -> Memory:
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


@final
class Chain:
    """Weights, and the limits of stages. A time is in units of the sums, for a speed of 1."""

    def __init__(
        self,
        weights: Sequence[float],
        ranks: int,
        memory: MemoryLimits | None = None,
        speeds: Sequence[float] | None = None,
        links: Sequence[LinkCost] | None = None,
        output_bytes: Sequence[int] = (),
    ) -> None:
        self.layers, self.ranks = len(weights), ranks
        enough(self.layers, ranks)
        self.sums = np.array(integer_sums(weights), np.int64)
        self.speeds = rank_speeds(speeds, ranks)
        self.sends = np.zeros((ranks, self.layers + 1))  # times of sending, [stage, stop]
        total = math.fsum(weights)
        scale = min(int(self.sums[-1]) / total, 1e300) if total else 1.0
        for boundary, link in enumerate(links or ()):
            self.sends[boundary, 1:] = [link.seconds(size) * scale for size in output_bytes]
        self.memory_tables = memory_tables(memory, self.layers, ranks)
        self.tables = (self.sums, self.speeds, self.sends, *self.memory_tables)

    def wanted(self, current: Partition | None) -> Sequence[int] | None:
        return None if current is None or current.stages != self.ranks else current.bounds

    def least(self) -> float:
        """The least bottleneck, by bisection between values that placements truly have.

        A success lowers `high` to the time of the placement found. A failure raises `low` to the
        least time at which some stage could take one layer more (Pinar and Aykanat's exact
        bisection).
        """
        heaviest = int(np.diff(self.sums).max()) / self.speeds.max()
        low = max(heaviest, int(self.sums[-1]) / self.speeds.sum())
        trial, high, share = low, math.inf, 1 / 64
        while low < high:
            feasible, value = self.probe(trial)
            low, high = (low, value) if feasible else (value, high)
            if low == math.inf:
                raise NoRoomError(f"no {self.ranks} stages of {self.layers} layers fit the memory")
            middle = (low + high) / 2 if high < math.inf else low * (1 + share)
            trial, share = middle if low < middle < high else low, 2 * share
        return float(high)

    def probe(self, bottleneck: float) -> tuple[bool, float]:
        """Tries one bottleneck.

        Returns (True, the largest time of a placement within it), or (False, the next to try).
        """
        bounds = np.zeros(self.ranks + 1, np.int64)
        rise = kernels.floors(self.tables, bottleneck, bounds)
        # Stages filled from the back are a placement, unless one is empty or something is sent.
        if bounds[0]:
            return False, rise
        if self.sends.any() or not (np.diff(bounds) > 0).all():
            low, reached, rise = self._reach(bottleneck)
            if not reached[-1, -1]:
                return False, rise
            bounds = self._nearest(bottleneck, low, reached, low)
        sends = self.sends[np.arange(self.ranks), bounds[1:]]
        return True, float((np.diff(self.sums[bounds]) / self.speeds + sends).max())

    def placed(self, bottleneck: float, wanted: Sequence[int] | None) -> Partition:
        """The placement within a bottleneck whose boundaries are nearest to `wanted`.

        None: the evenest one near equal shares of the load.
        """
        low, reached, _ = self._reach(bottleneck)
        shares = np.cumsum(self.speeds) / self.speeds.sum() * self.sums[-1]
        near = np.searchsorted(self.sums, [0, *shares]) if wanted is None else np.array(wanted)
        bounds = self._nearest(bottleneck, low, reached, near)
        if wanted is None:
            half = int(math.sqrt(_TRANSITIONS / self.ranks) / 2)
            low, width = np.maximum(low, bounds - half), min(2 * half, self.layers) + 1
            kernels.evenest(self.tables, bottleneck, low, reached, width, bounds)
        return Partition.from_bounds(bounds.tolist())

    def _reach(self, bottleneck: float) -> tuple[Ints, Bytes, float]:
        low = np.zeros(self.ranks + 1, np.int64)
        reached = np.zeros((self.ranks + 1, self.layers + 1), np.uint8)
        rise = kernels.floors(self.tables, bottleneck, low)
        if low[0] == 0:
            rise = min(rise, kernels.reach(self.tables, bottleneck, low, reached))
        return low, reached, rise

    def _nearest(self, bottleneck: float, low: Ints, reached: Bytes, wanted: Ints) -> Ints:
        bounds = np.zeros(self.ranks + 1, np.int64)
        kernels.nearest(self.tables, bottleneck, low, reached, wanted, bounds)
        return bounds
