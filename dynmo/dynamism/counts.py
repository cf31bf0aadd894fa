"""What layers count while they train, over the steps and wherever the layers were."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dynmo.dynamism.case import Layers

Counted = Callable[[nn.Module], Sequence[float]]
"""Returns what a layer has counted since it was asked last, and sets that back to 0."""


class Counts:
    """Numbers per layer, which add up until they are summed over the ranks.

    Args:
        numbers: How many numbers a layer counts.
    """

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers
        self._own: dict[int, Tensor] = {}

    def add(self, layers: Layers, counting: Sequence[int], counted: Counted) -> None:
        """Takes what this rank's layers have counted. Call it before they move.

        Args:
            layers: The model.
            counting: The layers that count.
            counted: Asks a layer.
        """
        own = set(layers.own)
        for index in counting:
            numbers = counted(layers.modules[index])
            if index in own:
                before = self._own.get(index, torch.zeros(self._numbers, dtype=torch.float64))
                self._own[index] = before + torch.tensor([float(number) for number in numbers], dtype=torch.float64)

    def total(self, layers: Layers, counting: Sequence[int], what: str) -> list[list[float]]:
        """Sums over the ranks of the first replica, and begins anew. All ranks call it.

        Args:
            layers: The model.
            counting: The layers that count.
            what: What is waited for, for messages.

        Returns:
            The numbers of each of these layers.
        """
        table = torch.zeros(len(counting), self._numbers, dtype=torch.float64)
        for place, index in enumerate(counting):
            if index in self._own:
                table[place] = self._own[index]
        self._own.clear()
        return layers.collective.sum(table, what).tolist()
