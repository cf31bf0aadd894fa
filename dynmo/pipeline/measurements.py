"""Gathers the measurements of an engine's layers, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dynmo.cost.layer_cost import LayerCost
from dynmo.runtime.engine.post_validation import PostValidation
from dynmo.runtime.engine.profiler import Profiler
from dynmo.runtime.state.layer_store import LayerStore


class Measurements:
    """Gathers what each rank has measured. All ranks call every method together.

    Args:
        layer_store: Holds this rank's layers.
        profiler: Holds this rank's readings.
        pending: Knows whether optimizers keep copies.
    """

    def __init__(
        self, layer_store: LayerStore, profiler: Profiler, pending: PostValidation
    ) -> None:
        self._layer_store, self._profiler, self._pending = layer_store, profiler, pending

    def costs(self) -> tuple[LayerCost, ...]:
        """Returns the measured cost of every layer: seconds per microbatch, and bytes."""
        store = self._layer_store
        pairs = [(layer, store.optimizers[index]) for index, layer in store.layers.items()]
        return self._profiler.gather(
            store.world,
            pairs,
            store.model.layers,
            copies=self._pending.copies,
            accumulation_groups=store.accumulation_groups,
        )

    def halves(self, costs: tuple[LayerCost, ...]) -> tuple[tuple[LayerCost, ...], ...]:
        """Returns `costs` from the earlier and from the later readings alone.

        Args:
            costs: Cost of each layer from all readings.

        Returns:
            The costs of both halves. Empty if some time has one reading only.
        """
        return self._profiler.gather_halves(
            self._layer_store.world, self._layer_store.layers, costs
        )

    @property
    def preempted(self) -> float:
        """Share of this rank's ops' time for which it lost its core to other processes."""
        return self._profiler.preempted

    def maxima(self, values: Sequence[float]) -> list[float]:
        """Returns the largest of the ranks' first values, of their second, and so on.

        Args:
            values: This rank's values.
        """
        table = torch.tensor(values, dtype=torch.float64)
        return self._layer_store.world.everyone.largest(
            table, "a measurement of every rank"
        ).tolist()

    @property
    def caches(self) -> bool:
        """True if outputs of a frozen prefix are kept."""
        return self._layer_store.outputs.limit > 0

    def cached(self) -> tuple[int, int]:
        """Returns the savings of the output caches of all ranks.

        Returns:
            The number of layer F's that the caches spared, and the bytes that they hold.
        """
        outputs = self._layer_store.outputs
        table = torch.tensor([outputs.spared, outputs.bytes], dtype=torch.int64)
        spared, held = self._layer_store.world.everyone.sum(table, "what the caches hold").tolist()
        return spared, held

    @property
    def reduction_seconds(self) -> tuple[float, float]:
        """Seconds of this rank's collectives over the replicas, in all steps so far.

        The first number is their total. The second is the part that this rank's own work did not
        hide.
        """
        return self._layer_store.replicas.seconds
