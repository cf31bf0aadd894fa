"""Layer freezing: a prefix of the model stops training (DynMo 2.2 and F.4).

The prefix is chosen by schedule, by AutoFreeze, or by Egeria (`egeria.py`). It starts at the
embedding. It runs no B and no W, keeps no activations and sends no gradients. Its optimizer state
stays, for unfreezing. Forward work remains, so freezing makes early stages cheap, not free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, final

from torch import nn

from dynmo import Change, Dynamism, Forecast, Layers, Signals
from dynmo.cases.freezing import Freezing
from dynmo.cases.freezing.cache import OutputCache
from dynmo.cases.freezing.egeria import Egeria
from dynmo.cases.freezing.prefix import (
    PrefixCase,
    freeze_prefix,
    front,
    last_to_learn,
    learns,
    units,
)
from dynmo.extend import ConfigError, RunFacts


@final
class ScheduledFreezing(PrefixCase):
    """Freezes the leading layers at given steps."""

    def __init__(self, schedule: Sequence[Sequence[int]]) -> None:
        self._schedule = tuple(schedule)

    def check(self, modules: Sequence[nn.Module]) -> None:
        most, last = max(count for _, count in self._schedule), last_to_learn(modules)
        if most > last:
            raise ConfigError(
                f"dynamism.freezing.schedule freezes {most} layers, but behind its first "
                f"{last + 1} the model has nothing to train, and the last of those must; freeze at "
                f"most {last}"
            )

    def act(self, step: int, layers: Layers) -> Change | None:
        return freeze_prefix(layers, self._due(step), f"schedule, step {step}")

    def acts(self, step: int) -> bool:
        return self._due(step) > self._due(step - 1)

    def forecast(self, step: int) -> Sequence[Forecast]:
        return tuple(
            Forecast(at, tuple(range(self._due(at - 1), count)), b=0.0, w=0.0)
            for at, count in self._schedule
            if at > step and count > self._due(at - 1)
        )

    def _due(self, step: int) -> int:
        return max((count for at, count in self._schedule if at <= step), default=0)


@final
class AutoFreeze(PrefixCase):
    """AutoFreeze (Liu et al. 2021): freezes modules whose gradient norm is steady.

    G_l is the norm of module l's gradient, added up over the steps of an interval. The change eta_l
    is |G_prev - G_l| / G_prev. The prefix freezes up to the first module whose eta is at or over
    the median of the unfrozen ones.

    The original adds up the gradients themselves, which costs another copy of the weights. The
    norms are at hand from clipping. Modules with nothing to train have no eta. They freeze with
    those behind them. Steps without any gradient, which an overflow has skipped, do not count.
    """

    def __init__(self, every: int, start: int, most: int, unit: str = "half") -> None:
        self._every, self._start, self._most, self._unit = every, start, most, unit
        self._modules: tuple[range, ...] = ()
        self._sums: list[float] = []
        self._previous: list[float] = []
        self._steps = 0

    def check(self, modules: Sequence[nn.Module]) -> None:
        self._most = min(self._most, last_to_learn(modules))

    def observe(self, signals: Signals) -> None:
        if signals.step < self._start or not any(signals.squared_norms):
            return
        assert self._modules, "a case acts before it observes"
        norms = [
            math.sqrt(math.fsum(signals.squared_norms[i] for i in module))
            for module in self._modules
        ]
        self._sums = (
            [a + b for a, b in zip(self._sums, norms, strict=True)] if self._sums else norms
        )
        self._steps += 1

    def act(self, step: int, layers: Layers) -> Change | None:
        self._modules = modules = units(layers.names, self._unit)
        if self._steps < self._every:
            return None
        current, previous = self._sums, self._previous
        self._sums, self._previous, self._steps = [], current, 0
        if not previous:
            return None
        changes = [
            abs(p - c) / p if p > 0 else math.inf for p, c in zip(previous, current, strict=True)
        ]
        stop = front(layers)
        unfrozen = [
            (module, change)
            for module, change in zip(modules, changes, strict=True)
            if module.start >= stop and learns(layers.modules, module)
        ]
        middle = median(change for _, change in unfrozen)
        for module, change in unfrozen:
            if module.stop > self._most or change >= middle:
                break
            stop = module.stop
        return freeze_prefix(layers, stop, f"AutoFreeze, median change {middle:.3g}")

    def acts(self, step: int) -> bool:
        # The step before may not have been observed yet.
        return self._steps + 1 >= self._every

    def state(self) -> dict[str, Any]:
        return {
            "unit": self._unit,
            "sums": self._sums,
            "previous": self._previous,
            "steps": self._steps,
        }

    def load(self, state: dict[str, Any]) -> None:
        if "sums" not in state or state.get("unit", self._unit) != self._unit:
            return  # the state is of another policy or other modules, so begin anew
        self._sums = list(state["sums"])
        self._previous = list(state["previous"])
        self._steps = int(state["steps"])


def make(options: Freezing, run: RunFacts) -> Dynamism:
    case = _policy(options, run)
    if options.cache_bytes:
        case.cache, case.wants_samples = OutputCache(int(options.cache_bytes)), True
    return case


def _policy(options: Freezing, run: RunFacts) -> PrefixCase:
    assert run.layers is not None
    most = run.layers - 1 if options.max_layers is None else options.max_layers
    if options.policy == "schedule":
        return ScheduledFreezing(options.schedule)
    if options.policy == "autofreeze":
        return AutoFreeze(options.every, options.start, most, options.unit)
    return Egeria(options, most, run.seed)
