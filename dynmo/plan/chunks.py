"""Several stages per rank, so that the busiest rank's time is least.

    looped  placement 0 1 2 0 1 2        V  placement 0 1 2 2 1 0
    layers  . . | . . | . | . | . . | .     both have 6 stages on 3 ranks
    rank 0  stages 0 and 3                  stages 0 and 5

Only the sum of a rank's stages counts, so one of its stages may be long and another short. An exact
answer is cheap for the V, because the ranks are nested from the outside inwards. Any other
placement is a hard problem. Branch and bound solves it if that takes at most `NODES` steps.
Otherwise an iterated descent is used, whose answer is not proven to be the best.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import NoRoomError, PartitionError
from dynmo.plan import _chunk_kernels as kernels
from dynmo.plan._kernels import Floats, Ints
from dynmo.plan.chains import enough, integer_sums, memory_tables, rank_speeds, same_layers
from dynmo.plan.partition import Partition, exact, stage_loads
from dynmo.schedule.generators import v_stage_ranks
from dynmo.schedule.memory import MemoryLimits

NODES = 2_000_000  # steps of branch and bound: some hundredths of a second
_STATES = 30_000_000  # bytes of the search through a V
_KICKS = 8_000_000  # restarts of the iterated descent, times the stages cubed
_NO_FLOW: kernels.Flow = (0, 0.0, np.zeros((3, 1)))
# A microbatch's way through the V takes some multiple of the time that it takes without waiting.
_STRETCHES = (1.0, 1.4, 1.6, 2.0)
# The first step above the least load, its growth, the last step, and how often a step is halved.
_RISE = (0.005, 1.8, 1.0, 3)


@dataclass(frozen=True)
class Chunked:
    """A placement with several stages per rank, and the time of its most loaded rank.

    `proven`: no placement has less.
    """

    partition: Partition
    seconds: float
    proven: bool


def chunked(
    weights: Sequence[float],
    stage_ranks: Sequence[int],
    *,
    memory: MemoryLimits | None = None,
    current: Partition | None = None,
    speeds: Sequence[float] | None = None,
    nodes: int = NODES,
) -> Chunked:
    """Places contiguous stages on ranks that have several each. No stage is empty.

    A rank's time is the sum of its stages' loads divided by its speed. With one stage per rank this
    is `exact`.

    Args:
        memory: The peaks of a rank's stages together must not be more than the least of their
            limits. None: unlimited.
        current: Is returned if nothing takes less time.
        nodes: The most steps of branch and bound.

    Raises:
        PartitionError: There are fewer layers than stages, a number is negative or not finite, or
            nothing is found that fits.
    """
    stages, ranks = len(stage_ranks), max(stage_ranks, default=-1) + 1
    if sorted(set(stage_ranks)) != list(range(ranks)) or not ranks:
        raise PartitionError(
            f"placement {list(stage_ranks)} must name the ranks 0 to {ranks - 1}, each at least "
            "once"
        )
    enough(len(weights), stages)
    for layers in (current.layers if current else None, len(memory.layers) if memory else None):
        if layers is not None:
            same_layers(layers, len(weights))
    if memory is not None and memory.stages != stages:
        raise PartitionError(
            f"memory limits for {memory.stages} stages, but {stages} in the placement; "
            "give one limit per stage"
        )
    rates = rank_speeds(speeds, ranks)
    if stages == ranks:
        own = rates[list(stage_ranks)].tolist()
        partition, proven = exact(weights, ranks, memory=memory, current=current, speeds=own), True
    else:
        partition, proven = _Chunks(weights, stage_ranks, memory, rates).solve(current, nodes)
    loads = stage_loads(weights, partition)
    times = (
        math.fsum(x for x, r in zip(loads, stage_ranks, strict=True) if r == rank)
        / rates[rank].item()
        for rank in range(ranks)
    )
    return Chunked(partition, max(times), proven)


def flowing(
    layers: Sequence[LayerCost],
    stage_ranks: Sequence[int],
    microbatches: int,
    *,
    memory: MemoryLimits | None = None,
    speeds: Sequence[float] | None = None,
) -> list[Partition]:
    """Places a V so that microbatches flow through it, and not only so that loads are even.

    A rank on which all layers are frozen, say, has nothing but F's, and all of them lie between the
    first F and the last F of rank 0. There is one placement for each assumption about how long a
    microbatch's way takes. The best of them is found by simulation.
    """
    flow = _Flow.of(layers, stage_ranks, memory, speeds)
    if flow is None:
        return []
    found = [flow.solve(microbatches, stretch)[0] for stretch in _STRETCHES]
    return [partition for partition in dict.fromkeys(found) if partition is not None]


def flow_bound(layers: Sequence[LayerCost], ranks: int, microbatches: int) -> float:
    """Bounds the span of any placement of a V, whatever its schedule. Messages take no time.

    Raises:
        PartitionError: There are fewer layers than stages, or too many for the search.
    """
    enough(len(layers), 2 * ranks)
    flow = _Flow.of(layers, v_stage_ranks(ranks), None, None)
    if flow is None:
        raise PartitionError(f"{len(layers)} layers on {ranks} ranks are too many to bound")
    return microbatches * flow.solve(microbatches, 1.0)[1]


@final
@dataclass(frozen=True)
class _Flow:
    """`least` is the least load. `ways` is in the same unit, of which a second has `unit`."""

    chunks: _Chunks
    least: float
    ways: Floats
    unit: float

    @classmethod
    def of(
        cls,
        layers: Sequence[LayerCost],
        stage_ranks: Sequence[int],
        memory: MemoryLimits | None,
        speeds: Sequence[float] | None,
    ) -> _Flow | None:
        ranks, weights = max(stage_ranks) + 1, [layer.seconds for layer in layers]
        size = (ranks + 1) * (len(layers) + 1) ** 2
        if tuple(stage_ranks) != v_stage_ranks(ranks) or size > _STATES:
            return None
        chunks = _Chunks(weights, stage_ranks, memory, rank_speeds(speeds, ranks))
        least = chunks.nested(np.array(exact(weights, chunks.stages).bounds, np.int64))
        if not 0 < least < math.inf:
            return None
        unit = int(chunks.sums[-1]) / math.fsum(weights)
        ways = np.zeros((3, len(layers) + 1))
        ways[:, 1:] = unit * np.cumsum([[getattr(x, key) for x in layers] for key in "fbw"], 1)
        return cls(chunks, least, ways, unit)

    def solve(self, microbatches: int, stretch: float) -> tuple[Partition | None, float]:
        """Finds a placement of nearly the least time, and a time that none is below."""
        tables, stages = self.chunks.tables, self.chunks.stages
        reached = np.zeros((stages // 2 + 1, *[len(self.chunks.sums)] * 2), np.uint8)
        bounds = np.zeros(stages + 1, np.int64)
        bounds[-1] = len(self.chunks.weights)
        flow: kernels.Flow = (microbatches, stretch, self.ways)
        step, growth, most, halvings = _RISE
        low, trial = self.least, self.least * (1 + 1e-12)
        while not kernels.nested(tables, flow, trial, reached, bounds)[0]:
            low, trial = trial, self.least * (1 + step)
            if step > most:
                return None, low / self.unit
            step *= growth
        for _ in range(halvings):
            trial_bounds, middle = bounds.copy(), (low + trial) / 2
            if kernels.nested(tables, flow, middle, reached, trial_bounds)[0]:
                bounds, trial = trial_bounds, middle
            else:
                low = middle
        return Partition.from_bounds(bounds.tolist()), low / self.unit


@final
class _Chunks:
    def __init__(
        self,
        weights: Sequence[float],
        stage_ranks: Sequence[int],
        memory: MemoryLimits | None,
        rates: Floats,
    ) -> None:
        self.weights, self.stage_ranks, self.memory = weights, stage_ranks, memory
        self.stages, self.ranks = len(stage_ranks), len(rates)
        self.sums, self.speeds = np.array(integer_sums(weights), np.int64), rates
        held, pairs, pair_at, _ = memory_tables(memory)
        self.caps: list[int] = []
        if memory is not None:
            of_rank = [
                [x for x, r in zip(memory.limits, stage_ranks, strict=True) if r == rank]
                for rank in range(self.ranks)
            ]
            self.caps = [max(-1, min(*limits, 1 << 62)) for limits in of_rank]
        rank_of, caps = np.array(stage_ranks, np.int64), np.array(self.caps, np.int64)
        self.tables = (self.sums, rank_of, self.speeds, held, pairs, pair_at, caps)

    def solve(self, current: Partition | None, nodes: int) -> tuple[Partition, bool]:
        """The placement, and whether it is proven to be the best."""
        bounds = np.array(exact(self.weights, self.stages).bounds, np.int64)
        if (
            tuple(self.stage_ranks) == v_stage_ranks(self.ranks)
            and (self.ranks + 1) * len(self.sums) ** 2 <= _STATES
        ):
            best, proven = self.nested(bounds), True
        else:
            floor = int(self.sums[-1]) / float(self.speeds.sum())
            best, over = kernels.wander(self.tables, bounds, 10, floor)
            best, proven = kernels.branch(self.tables, bounds, math.inf if over else best, nodes)
            proven = proven or best <= floor
            if not proven:
                best, over = kernels.wander(
                    self.tables, bounds, min(1000, max(20, _KICKS // self.stages**3)), floor
                )
                best = math.inf if over else best
        if best == math.inf:
            raise NoRoomError(self.no_memory(proven))
        if current is not None and current.stages == self.stages:
            largest, _, over = self.evaluate_bounds(current.bounds)
            if largest <= best and not over:
                return current, proven
        return Partition.from_bounds(bounds.tolist()), proven

    def evaluate_bounds(self, bounds: Sequence[int] | Ints) -> tuple[float, float, int]:
        return kernels.evaluate_bounds(
            self.tables, np.array(bounds, np.int64), np.zeros((self.ranks, 2), np.int64)
        )

    def nested(self, bounds: Ints) -> float:
        """Solves the V by bisection, as in `chains`. Returns infinity if nothing fits."""
        reached = np.zeros((self.ranks + 1, len(self.sums), len(self.sums)), np.uint8)
        total, largest = int(self.sums[-1]), int(np.diff(self.sums).max())
        low = max(total / float(self.speeds.sum()), largest / float(self.speeds.max()))
        own, _, over = self.evaluate_bounds(bounds)
        high = total / float(self.speeds.min()) if over else own
        best = math.inf if over else own
        trial = high if over else (low + high) / 2
        while low < high or best == math.inf:
            trial_bounds = bounds.copy()
            feasible, value = kernels.nested(self.tables, _NO_FLOW, trial, reached, trial_bounds)
            if feasible:
                best = high = value
                bounds[:] = trial_bounds
            elif value == math.inf or value > high:
                break  # nothing else would change
            else:
                low = value
            trial = (low + high) / 2 if low < (low + high) / 2 < high else low
        return best

    def no_memory(self, proven: bool) -> str:
        memory = self.memory
        assert memory is not None, "without memory limits a placement always exists"
        needs = self.evaluate_bounds(exact(self.weights, self.stages).bounds)[2]
        held = "no placement fits" if proven else "no placement that fits was found"
        return (
            f"{held} {self.stages} stages on {self.ranks} ranks of {min(self.caps)} to "
            f"{max(self.caps)} bytes: balanced by time they are "
            f"{needs} bytes over; use more ranks, a larger limit, a smaller microbatch or a "
            "schedule that keeps less"
        )
