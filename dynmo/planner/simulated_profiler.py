"""Simulates a run's profiler, which condenses the costs in a workload."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import final

from dynmo.cost.layer_cost import LayerCost
from dynmo.cost.readings import Readings, Times

Layers = tuple[LayerCost, ...]


@final
class SimulatedProfiler:
    """Condenses costs of steps as a run's profiler condenses its measurements.

    Both use `Readings`.
    """

    def __init__(self, layers: int, readings_per_step: int = 2) -> None:
        self._per_step = readings_per_step
        self._readings = [Readings() for _ in range(layers)]
        self._latest: Layers = ()

    def observe(self, layers: Layers) -> None:
        """Takes the costs of a finished step."""
        self._latest = layers
        for readings, layer in zip(self._readings, layers, strict=True):
            readings.add(*([seconds] * self._per_step for seconds in (layer.f, layer.b, layer.w)))

    def forget(self, layers: Iterable[int]) -> None:
        """Drops the readings of layers that have changed or moved."""
        for index in layers:
            self._readings[index] = Readings()

    def costs(self) -> Layers:
        """Returns the cost of every layer by all its readings."""
        return self._with([readings.seconds for readings in self._readings])

    def halves(self) -> tuple[Layers, ...]:
        """Returns the costs by the earlier and by the later readings alone.

        Empty if some layer has one reading only.
        """
        both = [readings.halves for readings in self._readings]
        known = [x for x in both if x is not None]
        return (
            tuple(self._with([x[half] for x in known]) for half in (0, 1))
            if len(known) == len(both)
            else ()
        )

    def _with(self, times: Sequence[Times]) -> Layers:
        return tuple(
            replace(layer, f=x.f, b=x.b, w=x.w)
            for layer, x in zip(self._latest, times, strict=True)
        )
