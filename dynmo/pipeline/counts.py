"""Numbers that layers count while they train, over steps and moves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.pipeline.case import Change, Dynamism, Layers, TokenShares

Numbers = tuple[float | Tensor, ...]
"""The counts of a layer. Tensors without dimensions stay on their device until a total is needed.
So no step waits for them."""
Counted = Callable[[nn.Module], Numbers | Tensor]
"""Returns the counts of a layer since the last call, and sets them back to 0. The layer must not
change a tensor that it has returned."""


class Counts:
    """Numbers per layer, which add up until they are summed over the ranks."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self._sums: dict[int, Numbers | Tensor] = {}
        # Sums that a checkpoint has, alike on all ranks.
        self._saved: list[list[float]] = []

    @staticmethod
    def of(
        layers: Layers, counting: Sequence[int], counted: Counted
    ) -> dict[int, Numbers | Tensor]:
        """Asks the layers for their counts. Call it before they move."""
        numbers = {index: counted(layers.modules[index]) for index in counting}
        own_layers = set(layers.own)
        return {index: each for index, each in numbers.items() if index in own_layers}

    def add(self, counted: Mapping[int, Numbers | Tensor]) -> None:
        for index, numbers in counted.items():
            self._sums[index] = _sum(self._sums[index], numbers) if index in self._sums else numbers

    def total(
        self, layers: Layers, counting: Sequence[int], what: str, all_replicas: bool = False
    ) -> list[list[float]]:
        """Sums over the ranks, and begins anew. All ranks call it."""
        table = torch.zeros(len(counting), self.numbers, dtype=torch.float64)
        for place, index in enumerate(counting):
            if index in self._sums:
                table[place] = _on_host(self._sums[index])
        self._sums.clear()
        collective = layers.collective
        (collective.sum_all if all_replicas else collective.sum)(table, what)
        saved = torch.tensor(self._saved, dtype=torch.float64)
        self._saved = []
        return (table + saved if saved.shape == table.shape else table).tolist()

    def save(
        self, layers: Layers | None, take: Callable[[Layers], Sequence[int]], all_replicas: bool
    ) -> list[list[float]]:
        """Returns the sums so far, for a checkpoint, and goes on. All ranks call it.

        Args:
            layers: The model. None: no step was counted.
            take: Asks this rank's layers for their counts. Returns the layers that count.
            all_replicas: As in `total`.
        """
        if layers is not None:
            self._saved = self.total(layers, take(layers), "counts to be saved", all_replicas)
        return self._saved

    def load(self, saved: list[list[float]]) -> None:
        self._sums.clear()
        self._saved = saved


class CountingCase(Dynamism):
    """A case whose layers count tokens. It records their shares every `record_every` steps.

    Each `act` calls that of this class.

    Args:
        numbers: Numbers that each layer counts.
        record_every: Steps between two records.
    """

    def __init__(self, numbers: int, record_every: int) -> None:
        self._every, self._counts = record_every, Counts(numbers)
        self._layers: Layers | None = None

    def attach(self, layers: Layers) -> None:
        self._layers = layers

    @abstractmethod
    def act(self, step: int, layers: Layers) -> Change | None:
        # A newcomer collects nothing before its first step. The next save sums on all ranks.
        self._layers = layers

    @abstractmethod
    def counting(self, modules: Sequence[nn.Module]) -> list[int]:
        """Returns the layers that count. Raises ConfigError if none does."""
        ...

    @abstractmethod
    def counted(self, module: Any) -> Numbers:
        """Returns the counts of a layer since the last call, and sets them back to 0."""
        ...

    @abstractmethod
    def shares(self, rows: list[list[float]]) -> Mapping[str, list[float]]:
        """Returns the shares of tokens by their names, from the numbers of each layer."""
        ...

    def records(self, step: int) -> bool:
        """Says whether shares are recorded before a step. `acts` must be true of it then."""
        return step > 0 and step % self._every == 0

    def check(self, modules: Sequence[nn.Module]) -> None:
        self.counting(modules)

    def collect(self, step: int, layers: Layers) -> TokenShares | None:
        counting = self._take(layers)
        if not self.records(step):
            return None
        rows = self._counts.total(layers, counting, f"the tokens that {self.name} counts")
        return TokenShares(tuple(counting), self.shares(rows))

    def _take(self, layers: Layers) -> list[int]:
        counting = self.counting(layers.modules)
        self._counts.add(Counts.of(layers, counting, self.counted))
        return counting

    def state(self) -> dict[str, Any]:
        return {"counts": self._counts.save(self._layers, self._take, all_replicas=False)}

    def load(self, state: dict[str, Any]) -> None:
        if self._layers is not None:
            self._take(self._layers)
        self._counts.load(state.get("counts", []))


def _sum(a: Numbers | Tensor, b: Numbers | Tensor) -> Numbers | Tensor:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        assert isinstance(a, Tensor), "a layer counts numbers of one kind"
        assert isinstance(b, Tensor), "a layer counts numbers of one kind"
        return a + b
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _on_host(numbers: Numbers | Tensor) -> Tensor:
    each = numbers.tolist() if isinstance(numbers, Tensor) else [float(x) for x in numbers]
    return torch.tensor(each, dtype=torch.float64)
