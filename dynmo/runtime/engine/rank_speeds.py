"""How fast each rank is, measured on the layers that it trains anyway."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import final

import torch

from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.speeds import Sample, Speeds, estimate_speeds
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.state.layer_store import LayerStore

_KINDS = 3  # of ops: F, B and W


@final
class RankSpeeds:
    """The speed of each rank of a pipeline, the same on every rank.

    The slowest replica counts, as it does for the costs.

    Attributes:
        current: None while all are 1.
    """

    def __init__(self, store: LayerStore, profiler: Profiler) -> None:
        self._store, self._profiler = store, profiler
        self._each: Speeds | None = None  # of each rank of each replica
        self._changed: set[int] = set()  # layers that differ from their kind since
        self.current: Speeds | None = None

    def on_workload_change(self, layers: Iterable[int]) -> None:
        """Notes layers whose work differs from now on from what their sizes say."""
        self._changed.update(layers)

    def reset(self) -> None:
        """Forgets the speeds, because the mesh is another one."""
        self._each = self.current = None

    def measure(self, costs: Sequence[LayerCost], disturbed: float) -> bool:
        """Updates the speeds from the latest readings. All ranks call it together.

        Args:
            costs: Cost of each layer. Only its sizes count.
            disturbed: Share of the ops' time that other processes take.

        Returns:
            Whether more readings may show other speeds.
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
        return estimate.uncertain

    def normalized(self, costs: tuple[LayerCost, ...]) -> tuple[LayerCost, ...]:
        """Returns measured costs as a rank of speed 1 would have them."""
        speeds = self.current
        if speeds is None:
            return costs
        own = [speeds[rank] for rank in self._ranks()]
        return tuple(
            replace(cost, f=cost.f * speed, b=cost.b * speed, w=cost.w * speed)
            for cost, speed in zip(costs, own, strict=True)
        )

    def _ranks(self) -> list[int]:
        """The rank that holds each layer."""
        layout = self._store.layout
        owners = map(layout.partition.owner, range(layout.partition.layers))
        return [layout.stage_ranks[stage] for stage in owners]

    def _samples(self, costs: Sequence[LayerCost]) -> list[Sample]:
        world, layout, model = self._store.world, self._store.layout, self._store.model
        count = len(costs)
        table = torch.zeros(layout.replicas, count, 1 + _KINDS * 3, dtype=torch.float64)
        table[:, sorted(self._changed), 0] = 1.0
        for index in self._store.layers:
            readings = self._profiler.readings(index)
            if readings is not None and readings.halves is not None:
                row = [*readings.seconds, *readings.halves[0], *readings.halves[1]]
                table[world.replica, index, 1:] = torch.tensor(row, dtype=torch.float64)
        world.everyone.largest(table, "everyone's readings")
        rows: list[list[list[float]]] = table.tolist()
        work = model.work or ((1.0,) * _KINDS,) * count
        kinds = self._store.identity.kinds if model.work is None else ("",) * count
        ranks, samples = self._ranks(), list[Sample]()
        for replica, of_layers in enumerate(rows):
            for index, (changed, *seconds) in enumerate(of_layers):
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
