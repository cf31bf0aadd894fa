"""The protocol of a dynamic case: something that changes the model's work while it trains.

Every rank holds the same cases and calls them with the same measurements, so all reach the same decision; nothing is sent. dynmo
itself never asks which case runs: it sees the costs that result.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from dynmo.errors import ConfigError


@dataclass(frozen=True)
class Signals:
    """What every rank knows after a step: squared gradient norms before clipping, one per layer in global order, and the loss."""

    step: int
    loss: float
    squared_norms: tuple[float, ...]


class Layers(Protocol):
    """What a case may do to the model, the same call on every rank. Takes effect before the next step."""

    @property
    def count(self) -> int: ...
    @property
    def frozen(self) -> frozenset[int]: ...
    def freeze(self, layers: Collection[int]) -> None: ...
    def unfreeze(self, layers: Collection[int]) -> None: ...


@dataclass(frozen=True)
class Change:
    """What a case did: the global indices of the layers whose cost is no longer what was measured, and a line for the log."""

    layers: tuple[int, ...]
    what: str


class Dynamism(Protocol):
    """One case. `act` is called before each step, `observe` after it; `state` goes into checkpoints (plain JSON)."""

    name: str

    def act(self, step: int, layers: Layers) -> Change | None: ...
    def observe(self, signals: Signals) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any]) -> None: ...


def make_cases(config: Any, layers: int) -> list[Dynamism]:
    """The cases that `[dynamism]` names, in its order."""
    from dynmo.dynamism import freezing

    makers = {"freezing": freezing.make}
    unknown = [case for case in config.dynamism.cases if case not in makers]
    if unknown:
        raise ConfigError(f"dynamism.cases: {unknown[0]!r} is not served by this version; choose from {', '.join(makers)}")
    return [makers[case](config, layers) for case in config.dynamism.cases]
