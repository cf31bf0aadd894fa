"""How fast each rank is, measured on the layers that it trains anyway.

    layers        a0 a1 | a2 a3 | a4 a5     alike, and rank 1 takes twice as long as the others
    seconds       1  1  | 2  2  | 1  1
    speeds           1  |  0.5  |  1

A speed is relative: the middle rank has the speed 1, the faster of two. Layers of one kind and size
are alike, whichever rank holds them, and so is a layer to itself on another replica. A speed counts
only if the evidence is clear:

- it differs by more than noise does
- most of the rank's work says so, and not one layer
- the earlier and the later half of the readings say so
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high
from typing import NamedTuple, final

import torch

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.readings import WINDOW
from dynmo.plan.problem import Speeds
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.state.layer_store import LayerStore

_KINDS = 3  # of ops: F, B and W
NOISE = 0.15
"""Speeds nearer than this share are equal. Ranks of one machine differ by less."""
_LASTS = 2 * WINDOW
"""A rank is slow to stay if it is still slow so many steps after a measurement has found it."""
_ROUNDS = 20  # the most turns between the kinds' costs and the ranks' speeds


@final
class RankSpeeds:
    """The speed of each rank of a pipeline, the same on every rank.

    The slowest replica counts, as it does for the costs.

    Attributes:
        current: None while all are 1.
        lasting: Speed of each rank of the mesh that several windows of readings in a row found
            slow.
    """

    def __init__(self, store: LayerStore, profiler: Profiler) -> None:
        self._store, self._profiler = store, profiler
        self._each: Speeds | None = None  # of each rank of each replica
        self._changed: set[int] = set()  # layers that differ from their kind since
        self.current: Speeds | None = None
        self._slow_since: dict[int, int] = {}  # slow ranks, and the step that found each
        self.lasting: Mapping[int, float] = {}

    def on_workload_change(self, layers: Iterable[int]) -> None:
        """Notes layers whose work differs from now on from what their sizes say."""
        self._changed.update(layers)

    def reset(self) -> None:
        """Forgets the speeds, because the mesh is another one."""
        self._each = self.current = None
        self._slow_since, self.lasting = {}, {}

    def measure(self, costs: Sequence[LayerCost], disturbed: float, step: int) -> bool:
        """Updates the speeds from the latest readings. All ranks call it together.

        Args:
            costs: Cost of each layer. Only its sizes count.
            disturbed: Share of the ops' time that other processes take.
            step: The next step.

        Returns:
            Whether more readings may show other speeds, or a slow rank that stays slow.
        """
        layout = self._store.layout
        count = layout.ranks * layout.replicas
        if count == 1:
            return False
        known = self._each or (1.0,) * count
        estimate = estimate_speeds(self._samples(costs), known, disturbed)
        self._each = estimate.speeds
        rows = range(0, count, layout.replicas)
        slowest = tuple(min(estimate.speeds[i : i + layout.replicas]) for i in rows)
        self.current = None if all(speed == 1 for speed in slowest) else slowest
        slow = {rank: speed for rank, speed in enumerate(estimate.speeds) if speed < 1}
        self._slow_since = {rank: self._slow_since.get(rank, step) for rank in slow}
        self.lasting = {
            rank: speed for rank, speed in slow.items() if step >= self._slow_since[rank] + _LASTS
        }
        return estimate.uncertain or self.lasting != slow

    def of_ranks(self) -> Speeds | None:
        """Returns the speed of each rank of the mesh. Ranks that are not slow to stay have 1."""
        count = self._store.layout.ranks * self._store.layout.replicas
        return tuple(self.lasting.get(rank, 1.0) for rank in range(count)) if self.lasting else None

    def compared(self, rank: int) -> tuple[float, int | None]:
        """Returns how many times as long a rank takes for equal work, and as which twin.

        The twin has the same stages in another replica. None: no twin is faster, and the rank is
        compared with the middle rank.
        """
        if self._each is None:
            return 1.0, None
        replicas, speed = self._store.layout.replicas, self._each[rank]
        first = rank - rank % replicas
        twin = max(range(first, first + replicas), key=self._each.__getitem__)
        if self._each[twin] > speed:
            return round(self._each[twin] / speed, 2), twin
        return round(1 / speed, 2), None

    def normalized(self, costs: tuple[LayerCost, ...]) -> tuple[LayerCost, ...]:
        """Returns measured costs as a rank of speed 1 would have them."""
        speeds = self.current
        if speeds is None:
            return costs
        layer_speeds = [speeds[rank] for rank in self._ranks()]
        return tuple(
            replace(cost, f=cost.f * speed, b=cost.b * speed, w=cost.w * speed)
            for cost, speed in zip(costs, layer_speeds, strict=True)
        )

    def _ranks(self) -> list[int]:
        """The rank that holds each layer."""
        layout = self._store.layout
        owners = map(layout.partition.owner, range(layout.partition.layers))
        return [layout.stage_ranks[stage] for stage in owners]

    def _samples(self, costs: Sequence[LayerCost]) -> list[Sample]:
        world, layout, model = self._store.world, self._store.layout, self._store.model
        count = len(costs)
        own_readings = torch.zeros(count, 1 + _KINDS * 3, dtype=torch.float64)
        own_readings[sorted(self._changed), 0] = 1.0
        for index in self._store.layers:
            readings = self._profiler.readings(index)
            if readings is not None and readings.halves is not None:
                row = [*readings.seconds, *readings.halves[0], *readings.halves[1]]
                own_readings[index, 1:] = torch.tensor(row, dtype=torch.float64)
        what = "everyone's readings"
        table = world.peers.gather(world.largest(own_readings, what), what)
        table[:, :, 0] = table[:, :, 0].amax(0)
        rows: list[list[list[float]]] = table.tolist()
        work = model.work or ((1.0,) * _KINDS,) * count
        kinds = self._store.identity.kinds if model.work is None else ("",) * count
        ranks, samples = self._ranks(), list[Sample]()
        for replica, layer_speeds in enumerate(rows):
            for index, (changed, *seconds) in enumerate(layer_speeds):
                kind = index if changed else _kind(kinds[index], costs[index])
                rank = ranks[index] * layout.replicas + replica
                for op in range(_KINDS):
                    whole, early, late = seconds[op::_KINDS]
                    amount = work[index][op]
                    samples.append(Sample(rank, (kind, op), amount, (whole, early, late)))
        return samples


def _kind(kind: str, cost: LayerCost) -> Hashable:
    """What layers of equal work have in common: modules, attributes and sizes."""
    return (
        kind,
        cost.parameters,
        cost.weight_bytes,
        cost.gradient_bytes,
        cost.activation_bytes,
        cost.stash_bytes,
        cost.output_bytes,
    )


# -- from times to speeds --------------------------------------------------------------------------


class Sample(NamedTuple):
    """The seconds of one kind of op of a layer on one rank.

    Attributes:
        rank: The rank that measured it.
        kind: Samples of one kind take equally long on equal ranks, per `work`.
        work: The op's amount of work.
        seconds: By all readings, by the earlier ones, and by the later ones.
    """

    rank: int
    kind: Hashable
    work: float
    seconds: tuple[float, float, float]


@dataclass(frozen=True)
class SpeedEstimate:
    """The speeds that count, and whether more readings may show others."""

    speeds: Speeds
    uncertain: bool = False


def estimate_speeds(
    samples: Sequence[Sample], known: Speeds, disturbed: float = 0.0
) -> SpeedEstimate:
    """Estimates the speed of each rank.

    Args:
        samples: Those of all ranks.
        known: The speeds that count so far. They stay unless there is clear evidence.
        disturbed: Share of the ops' time that other processes take. Readings scatter with it.
    """
    noise = math.log1p(NOISE + disturbed / 2)
    whole, *halves = (_fit(samples, len(known), part) for part in range(3))
    speeds, uncertain = list(known), False
    for rank, spread in enumerate(whole):
        if spread is None:
            continue
        before = math.log(known[rank])
        said = [spread, *(half[rank] for half in halves)]
        far = [each is not None and each.is_beyond(before, noise) for each in said]
        if all(far):
            settled = 0.0 if abs(spread.middle) <= noise else spread.middle
            speeds[rank] = round(math.exp(settled), 2)
        else:
            uncertain = uncertain or far[0] or far[2]
    return SpeedEstimate(tuple(max(0.01, speed) for speed in speeds), uncertain)


_Taken = tuple[Hashable, float, float]
"""A sample's kind, the logarithm of its seconds per work, and its seconds."""


class _Spread(NamedTuple):
    """Logarithms of a rank's speed, as a quarter, half and three quarters of its work have it."""

    low: float
    middle: float
    high: float

    def is_beyond(self, value: float, noise: float) -> bool:
        return self.low > value + noise or self.high < value - noise


def _fit(samples: Sequence[Sample], ranks: int, part: int) -> list[_Spread | None]:
    """Returns each rank's speed. None if nothing of the rank can be compared.

    A kind's cost is the median over ranks of what the rank needs, times its speed. A rank's speed
    is the median over kinds of the cost by what it needs. Both take turns until neither changes.
    """
    found: dict[tuple[Hashable, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.work > 0 and sample.seconds[part] > 0:
            found[sample.kind, sample.rank].append(sample)
    cells: dict[Hashable, dict[int, float]] = defaultdict(dict)
    for (kind, rank), some in found.items():
        cells[kind][rank] = math.log(median(x.seconds[part] / x.work for x in some))
    cells = {kind: row for kind, row in cells.items() if len(row) > 1}
    of_rank = defaultdict[int, list[_Taken]](list)
    for (kind, rank), some in found.items():
        if kind in cells:
            of_rank[rank] += [
                (kind, math.log(x.seconds[part] / x.work), x.seconds[part]) for x in some
            ]
    speeds, cost = [0.0] * ranks, dict[Hashable, float]()
    for _ in range(_ROUNDS):
        cost = {
            kind: median(taken + speeds[rank] for rank, taken in row.items())
            for kind, row in cells.items()
        }
        spreads = [_spread_of(of_rank[rank], cost) for rank in range(ranks)]
        after = [0.0 if x is None else x.middle for x in spreads]
        if after == speeds:
            break
        speeds = after
    else:
        spreads = [_spread_of(of_rank[rank], cost) for rank in range(ranks)]
    linked = [x.middle for x in spreads if x is not None]
    if not linked:
        return spreads
    one = median_high(linked)
    return [x and _Spread(*(each - one for each in x)) for x in spreads]


def _spread_of(taken: Sequence[_Taken], cost: dict[Hashable, float]) -> _Spread | None:
    said = sorted((cost[kind] - log, seconds) for kind, log, seconds in taken)
    if not said:
        return None
    total = math.fsum(weight for _, weight in said)
    return _Spread(*(_quantile(said, share * total) for share in (0.25, 0.5, 0.75)))


def _quantile(said: Sequence[tuple[float, float]], target: float) -> float:
    """The first value at which the weights so far reach `target`."""
    reached = 0.0
    for value, weight in said:
        reached += weight
        if reached >= target:
            return value
    return said[-1][0]
