"""The least bottleneck of ranks that have several stages.

    looped  placement 0 1 2 0 1 2        V  placement 0 1 2 2 1 0
    layers  . . | . . | . | . | . . | .     both have 6 stages on 3 ranks
    rank 0  stages 0 and 3                  stages 0 and 5

Only the sum of a rank's stages counts, so one of its stages may be long and another short. An exact
answer is cheap for the V, because the ranks are nested from the outside inwards. Any other
placement is a hard problem. An iterated descent then finds a good answer, and not always the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import numpy as np

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import NoRoomError
from dynmo.plan import _kernels as kernels
from dynmo.plan._kernels import Floats, Ints, Origins
from dynmo.plan.bisection import exact, integer_sums, memory_tables, rank_speeds
from dynmo.plan.partition import Partition, enough
from dynmo.schedule.generators import v_stage_ranks
from dynmo.schedule.memory import MemoryLimits

_STATES = 30_000_000  # of the search through a V, four bytes each
_KICKS = 8_000_000  # restarts of the iterated descent, times the stages cubed
_NO_FLOW: kernels.Flow = (0, 0.0, np.zeros((3, 1)))
# A microbatch's way through the V takes some multiple of the time that it takes without waiting.
_STRETCHES = (1.0, 1.4, 1.6, 2.0)
# The first step above the least load, its growth, the last step, and how often a step is halved.
_RISE = (0.005, 1.8, 1.0, 3)


def chunked(
    weights: Sequence[float],
    stage_ranks: Sequence[int],
    *,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    speeds: Sequence[float] | None = None,
) -> Partition:
    """Places contiguous stages on ranks that have several each. No stage is empty.

    A rank's time is the sum of its stages' loads divided by its speed. With one stage per rank this
    is `exact`.

    Args:
        memory: The peaks of a rank's stages together must not be more than the least of their
            limits. None: unlimited.
        current: Is returned if nothing takes less time.

    Raises:
        PartitionError: There are fewer layers than stages, a number is negative or not finite, or
            nothing is found that fits.
    """
    stages, ranks = len(stage_ranks), max(stage_ranks) + 1
    enough(len(weights), stages)
    rates = rank_speeds(speeds, ranks)
    if stages == ranks:
        own = rates[list(stage_ranks)].tolist()
        return exact(weights, ranks, memory=memory, current=current, speeds=own)
    return _Chunks(weights, stage_ranks, memory, rates).solve(current)


def flowing(
    layers: Sequence[LayerCost],
    stage_ranks: Sequence[int],
    microbatches: int,
    stretches: Iterable[float] = _STRETCHES,
    memory: MemoryLimits | None = None,
    speeds: Sequence[float] | None = None,
) -> Iterator[tuple[Partition | None, float]]:
    """Places a V so that microbatches flow through it, and not only so that loads are even.

    A rank on which all layers are frozen, say, has nothing but F's, and all of them lie between the
    first F and the last F of rank 0. For each assumption about how long a microbatch's way takes,
    yields a placement of nearly the least time, and seconds that none is below. The best placement
    is found by simulation.
    """
    weights = [layer.seconds for layer in layers]
    chunks = _Chunks(weights, stage_ranks, memory, rank_speeds(speeds, max(stage_ranks) + 1))
    if not chunks.is_small_v:
        return
    least = chunks.nested(np.array(exact(weights, chunks.stages).bounds, np.int64))
    if not 0 < least < math.inf:
        return
    # In the unit of the loads, of which a second has `unit`.
    unit, ways = int(chunks.sums[-1]) / math.fsum(weights), np.zeros((3, len(layers) + 1))
    ways[:, 1:] = unit * np.cumsum([[getattr(x, key) for x in layers] for key in "fbw"], 1)
    came, bounds = chunks.states(), np.zeros(chunks.stages + 1, np.int64)
    bounds[-1] = len(layers)
    for stretch in stretches:
        flow: kernels.Flow = (microbatches, stretch, ways)
        step, growth, most, halvings = _RISE
        low, trial, placed = least, least * (1 + 1e-12), True
        while placed and not kernels.nested(chunks.tables, flow, trial, came, bounds)[0]:
            low, trial, placed = trial, least * (1 + step), step <= most
            step *= growth
        for _ in range(halvings if placed else 0):
            trial_bounds, middle = bounds.copy(), (low + trial) / 2
            if kernels.nested(chunks.tables, flow, middle, came, trial_bounds)[0]:
                bounds, trial = trial_bounds, middle
            else:
                low = middle
        yield Partition.from_bounds(bounds.tolist()) if placed else None, low / unit


@final
class _Chunks:
    def __init__(
        self,
        weights: Sequence[float],
        stage_ranks: Sequence[int],
        memory: MemoryLimits | None,
        rates: Floats,
    ) -> None:
        self.weights, self.stage_ranks = weights, stage_ranks
        self.stages, self.ranks = len(stage_ranks), len(rates)
        self.sums, self.speeds = np.array(integer_sums(weights), np.int64), rates
        held, pairs, pair_at, limits = memory_tables(memory, len(weights), self.stages)
        rank_of = np.array(stage_ranks, np.int64)
        caps = np.array(
            [limits[rank_of == rank].min() for rank in range(self.ranks) if limits.size], np.int64
        )
        self.tables = (self.sums, rank_of, self.speeds, held, pairs, pair_at, caps)

    def solve(self, current: Partition | None) -> Partition:
        bounds = np.array(exact(self.weights, self.stages).bounds, np.int64)
        if self.is_small_v:
            best = self.nested(bounds)
        else:
            floor = int(self.sums[-1]) / float(self.speeds.sum())
            kicks = min(1000, max(20, _KICKS // self.stages**3))
            over, best, _ = kernels.wander(self.tables, bounds, kicks, floor)
            best = math.inf if over else best
        if best == math.inf:
            raise NoRoomError(f"no {self.stages} stages of {self.ranks} ranks fit the memory")
        if current is not None and current.stages == self.stages:
            over, largest, _ = self.evaluate_bounds(current.bounds)
            if largest <= best and not over:
                return current
        return Partition.from_bounds(bounds.tolist())

    @property
    def is_small_v(self) -> bool:
        """Whether it is a V with few enough states for an exact search."""
        is_v = tuple(self.stage_ranks) == v_stage_ranks(self.ranks)
        return is_v and (self.ranks + 1) * len(self.sums) ** 2 <= _STATES

    def states(self) -> Origins:
        return np.zeros((self.ranks + 1, len(self.sums), len(self.sums)), np.int32)

    def evaluate_bounds(self, bounds: Sequence[int] | Ints) -> tuple[int, float, float]:
        return kernels.evaluate_bounds(
            self.tables, np.array(bounds, np.int64), np.zeros((self.ranks, 2), np.int64)
        )

    def nested(self, bounds: Ints) -> float:
        """Solves the V by bisection, as `Chain.least` does. Returns infinity if nothing fits."""
        came = self.states()
        total, largest = int(self.sums[-1]), int(np.diff(self.sums).max())
        low = max(total / float(self.speeds.sum()), largest / float(self.speeds.max()))
        over, own, _ = self.evaluate_bounds(bounds)
        high = total / float(self.speeds.min()) if over else own
        best = math.inf if over else own
        trial = high if over else (low + high) / 2
        while low < high or best == math.inf:
            trial_bounds = bounds.copy()
            feasible, value = kernels.nested(self.tables, _NO_FLOW, trial, came, trial_bounds)
            if feasible:
                best = high = value
                bounds[:] = trial_bounds
            elif value == math.inf or value > high:
                break  # nothing else would change
            else:
                low = value
            trial = (low + high) / 2 if low < (low + high) / 2 < high else low
        return best
