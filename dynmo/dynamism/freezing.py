"""Layer freezing: a prefix of the model stops training (DynMo 2.2 and F.4).

A frozen prefix starts at the embedding. It runs no B and no W, keeps no activations and sends no gradients; its optimizer state stays, for
unfreezing. Forward work remains (ALGORITHMS: "where the work falls"), so freezing makes early stages cheap, not free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from dynmo.dynamism import Change, Dynamism, Layers, Signals
from dynmo.errors import ConfigError


class ScheduledFreezing:
    """Freezes the leading layers at given steps: [(step, layers), ...]."""

    name = "freezing"

    def __init__(self, schedule: Sequence[tuple[int, int]]) -> None:
        self._schedule = tuple(schedule)

    def act(self, step: int, layers: Layers) -> Change | None:
        due = max((count for at, count in self._schedule if at <= step), default=0)
        return freeze_prefix(layers, due, f"schedule, step {step}")

    def observe(self, signals: Signals) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        pass


class AutoFreeze:
    """AutoFreeze (Liu et al. 2021): a layer whose gradient norm has stopped changing may freeze.

    Per interval, G_l is the norm of layer l's gradient added up over the interval's steps, and eta_l = |G_prev - G_l| / G_prev. The
    prefix up to the first layer whose eta is at or over the median of the unfrozen ones freezes. (The original adds up the gradients
    themselves, which costs another copy of the weights; norms are at hand from clipping.)
    """

    name = "freezing"

    def __init__(self, every: int, start: int, most: int) -> None:
        self._every, self._start, self._most = every, start, most
        self._sums: list[float] = []
        self._previous: list[float] = []
        self._steps = 0

    def observe(self, signals: Signals) -> None:
        if signals.step < self._start:
            return
        norms = [math.sqrt(x) for x in signals.squared_norms]
        self._sums = [a + b for a, b in zip(self._sums, norms, strict=True)] if self._sums else norms
        self._steps += 1

    def act(self, step: int, layers: Layers) -> Change | None:
        if self._steps < self._every:
            return None
        current, previous = self._sums, self._previous
        self._sums, self._previous, self._steps = [], current, 0
        if not previous:
            return None
        first = len(layers.frozen)
        changes = [abs(p - c) / p if p > 0 else math.inf for p, c in zip(previous, current, strict=True)]
        # The last layer always trains: a loss must reach something.
        unfrozen = changes[first:]
        middle = median(unfrozen)
        stop = first
        while stop < self._most and changes[stop] < middle:
            stop += 1
        return freeze_prefix(layers, stop, f"AutoFreeze, median change {middle:.3g}")

    def state(self) -> dict[str, Any]:
        return {"sums": self._sums, "previous": self._previous, "steps": self._steps}

    def load(self, state: dict[str, Any]) -> None:
        self._sums, self._previous, self._steps = list(state["sums"]), list(state["previous"]), int(state["steps"])


def freeze_prefix(layers: Layers, count: int, why: str) -> Change | None:
    """Freezes layers 0 .. count-1; None if they already are. Never thaws."""
    new = tuple(i for i in range(count) if i not in layers.frozen)
    if not new:
        return None
    layers.freeze(new)
    return Change(new, f"froze layers {new[0]} to {new[-1]} ({why}); {count} of {layers.count} are frozen")


def make(config: Any, layers: int) -> Dynamism:
    """From `[dynamism.freezing]`. Raises ConfigError when it would freeze every layer."""
    options = config.dynamism.freezing
    most = layers - 1 if options.max_layers is None else options.max_layers
    counts = [count for _, count in options.schedule]
    if max([0, *counts]) > layers - 1 or most > layers - 1:
        raise ConfigError(f"dynamism.freezing: {max([most, *counts])} layers to freeze, but the model has {layers} and the last must train")
    if options.policy == "schedule":
        if not options.schedule:
            raise ConfigError("dynamism.freezing.schedule is empty; give [[step, layers], ...] or choose policy = 'autofreeze'")
        return ScheduledFreezing([(at, count) for at, count in options.schedule])
    return AutoFreeze(options.every, options.start, most)
