"""What layers count while they train, over the steps and wherever the layers were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dynmo.dynamism.case import Layers

Counted = Callable[[nn.Module], "Sequence[float | Tensor] | Tensor"]
"""Returns what a layer has counted since it was asked last, and sets that back to 0."""


def counts_of(layers: Layers, counting: Sequence[int], counted: Counted) -> dict[int, Tensor]:
    """Asks the layers what they have counted. Call it before they move.

    Args:
        layers: The model.
        counting: The layers that count.
        counted: Asks a layer.

    Returns:
        The numbers of this rank's layers, float64.
    """
    numbers = {index: counted(layers.modules[index]) for index in counting}
    own = set(layers.own)
    return {index: torch.tensor([float(x) for x in each], dtype=torch.float64) for index, each in numbers.items() if index in own}


class Counts:
    """Numbers per layer, which add up until they are summed over the ranks.

    Args:
        numbers: How many numbers a layer counts.
    """

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers
        self._own: dict[int, Tensor] = {}

    def add(self, counted: Mapping[int, Tensor]) -> None:
        """Adds what this rank's layers have counted.

        Args:
            counted: Of each layer, float64 [numbers].
        """
        for index, numbers in counted.items():
            self._own[index] = self._own.get(index, torch.zeros(self._numbers, dtype=torch.float64)) + numbers

    def total(self, layers: Layers, counting: Sequence[int], what: str, all_replicas: bool = False) -> list[list[float]]:
        """Sums over the ranks, and begins anew. All ranks call it.

        Args:
            layers: The model.
            counting: The layers that count.
            what: What is waited for, for messages.
            all_replicas: Whether every replica counts. If not, the first one does.

        Returns:
            The numbers of each of these layers.
        """
        table = torch.zeros(len(counting), self._numbers, dtype=torch.float64)
        for place, index in enumerate(counting):
            if index in self._own:
                table[place] = self._own[index]
        self._own.clear()
        collective = layers.collective
        return (collective.sum_all if all_replicas else collective.sum)(table, what).tolist()
