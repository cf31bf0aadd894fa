"""Numbers that layers count while they train, over steps and moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dynmo.dynamism.case import Layers

Numbers = tuple[float | Tensor, ...]
"""The counts of a layer. Tensors without dimensions stay on their device until a total is needed.
So no step waits for them."""
Counted = Callable[[nn.Module], Numbers | Tensor]
"""Returns the counts of a layer since the last call, and sets them back to 0. The layer must not
change a tensor that it has returned."""


def counts_of(
    layers: Layers, counting: Sequence[int], counted: Counted
) -> dict[int, Numbers | Tensor]:
    """Asks the layers for their counts. Call it before they move."""
    numbers = {index: counted(layers.modules[index]) for index in counting}
    own = set(layers.own)
    return {index: each for index, each in numbers.items() if index in own}


class Counts:
    """Numbers per layer, which add up until they are summed over the ranks."""

    def __init__(self, numbers: int) -> None:
        self._numbers = numbers
        self._own: dict[int, Numbers | Tensor] = {}

    def add(self, counted: Mapping[int, Numbers | Tensor]) -> None:
        for index, numbers in counted.items():
            self._own[index] = _sum(self._own[index], numbers) if index in self._own else numbers

    def total(
        self, layers: Layers, counting: Sequence[int], what: str, all_replicas: bool = False
    ) -> list[list[float]]:
        """Sums over the ranks, and begins anew. All ranks call it."""
        table = torch.zeros(len(counting), self._numbers, dtype=torch.float64)
        for place, index in enumerate(counting):
            if index in self._own:
                table[place] = _on_host(self._own[index])
        self._own.clear()
        collective = layers.collective
        return (collective.sum_all if all_replicas else collective.sum)(table, what).tolist()


def _sum(a: Numbers | Tensor, b: Numbers | Tensor) -> Numbers | Tensor:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor), "a layer counts numbers of one kind"
        assert isinstance(b, Tensor), "a layer counts numbers of one kind"
        return a + b
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _on_host(numbers: Numbers | Tensor) -> Tensor:
    each = numbers.tolist() if isinstance(numbers, Tensor) else [float(x) for x in numbers]
    return torch.tensor(each, dtype=torch.float64)
