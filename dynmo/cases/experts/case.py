"""Mixture of experts: measures the load of the experts, and places them.

Source: DynMo 2.2. With `model.routing = "bias"` the case also moves the bias of each expert against
its load. With `parallel.expert` over 1 it decides which replica computes which expert
(`dynmo.cases.experts.search`), by the counts of the last steps, never by times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo import Change, Dynamism, Layers, ModelOptions, Signals
from dynmo.cases.experts.options import Experts
from dynmo.cases.experts.search import loads_of, place_experts
from dynmo.extend import ConfigError, Counts, GroupPlacement, RunFacts, TokenShares, layers_that


@final
class ExpertsCase(Dynamism):
    """Counts tokens by expert.

    Args:
        options: The options of the case.
        experts: Experts of a layer. 0: `check` counts them.
        bias_rate: Change of a bias in a step.
        ranks: Replicas that share the experts.
        most: Most experts of a layer on one replica, or the redundant ones if `experts` is 0.
    """

    name = "experts"

    def __init__(
        self, options: Experts, experts: int, bias_rate: float, ranks: int = 1, most: int = 0
    ) -> None:
        self._options, self._rate, self._ranks, self._most = options, bias_rate, ranks, most
        self._layers: Layers | None = None
        # Tokens by replica of the group and by expert. The first counts begin anew at each record,
        # the second at each decision.
        self._recorded, self._by_source = Counts(0), Counts(0)
        self._count(experts)

    def _count(self, experts: int) -> None:
        self._experts = experts
        self._recorded.numbers = self._by_source.numbers = experts * self._ranks

    def check(self, modules: Sequence[nn.Module]) -> None:
        layers = experts_of(modules)
        if self._experts:
            return
        # The model says how many experts a layer has, and whether biases keep their load even.
        weights = [getattr(_router(modules[index]), "weight", None) for index in layers]
        sizes = {len(weight) for weight in weights if isinstance(weight, Tensor)}
        if len(sizes) != 1:
            raise ConfigError(
                "experts: every router needs a weight [experts, ...] with equally many experts"
            )
        (experts,) = sizes
        self._count(experts)
        self._most = min(experts, experts // self._ranks + self._most)
        if any(hasattr(_router(modules[index]), "bias") for index in layers):
            self._rate = ModelOptions().bias_rate

    def attach(self, layers: Layers) -> None:
        self._layers = layers

    def act(self, step: int, layers: Layers) -> Change | None:
        self._layers = layers
        return self._place(layers) if self._decides(step) else None

    def acts(self, step: int) -> bool:
        return step > 0 and (self._rate > 0 or self._records(step) or self._decides(step))

    def _decides(self, step: int) -> bool:
        every = self._options.place_every
        return self._ranks > 1 and every > 0 and step > 0 and step % every == 0

    def _place(self, layers: Layers) -> Change | None:
        """Moves the experts of each layer if that evens the load of the replicas."""
        spread, ranks = layers.spread, self._ranks
        assert spread is not None, "`parallel.expert` is over 1"
        current = spread.placements
        indices = sorted(current)
        rows = self._by_source.total(
            layers, indices, "the load of every expert by replica", all_replicas=True
        )
        changed, before, after = dict[int, GroupPlacement](), 1.0, 1.0
        for index, row in zip(indices, rows, strict=True):
            sources = self._sources(row)
            placement = place_experts(
                sources, ranks, self._most, current[index], self._options.least_gain
            )
            before = max(before, _hottest(loads_of(current[index], sources)))
            after = max(after, _hottest(loads_of(placement, sources)))
            if placement != current[index] and all(map(placement.held_by, range(ranks))):
                changed[index] = placement
        if not changed:
            return None
        moved = spread.move(changed)
        what = (
            f"moved experts of {len(changed)} layers ({moved / 1e6:.1f} MB): busiest replica "
            f"x{before:.2f} of the mean, then x{after:.2f}"
        )
        return Change(tuple(changed), what)

    def _records(self, step: int) -> bool:
        return step > 0 and step % self._options.record_every == 0

    def collect(self, step: int, layers: Layers) -> TokenShares | None:
        self._layers = layers
        indices = self._take_all(layers)
        if not self._records(step):
            return None
        rows = self._recorded.total(
            layers, indices, "the load of every expert", all_replicas=self._ranks > 1
        )
        sources = [self._sources(row) for row in rows]
        loads = [[math.fsum(of) for of in zip(*each, strict=True)] for each in sources]
        shares = {
            "hottest expert": [_hottest(load) for load in loads],
            "unused": [_unused(load) for load in loads],
        }
        if layers.spread is not None:
            placements = layers.spread.placements
            shares["busiest replica"] = [
                _hottest(loads_of(placements[i], each))
                for i, each in zip(indices, sources, strict=True)
            ]
        return TokenShares(tuple(indices), shares)

    def _sources(self, row: Sequence[float]) -> list[Sequence[float]]:
        """Returns the tokens by expert, for each replica of the group."""
        return [row[first : first + self._experts] for first in range(0, len(row), self._experts)]

    def observe(self, signals: Signals) -> None:
        """Moves the biases as soon as a step is final, for the next checkpoint."""
        layers = self._layers
        if not self._rate or layers is None:
            return
        indices = experts_of(layers.modules)
        last = Counts(self._experts)
        last.add(self._take(layers, indices))
        self._move_biases(layers, indices, last)

    def state(self) -> dict[str, Any]:
        if self._ranks == 1:
            return {"recorded": self._recorded.save(self._layers, self._take_all, False)}
        return {
            "recorded": self._recorded.save(self._layers, self._take_all, True),
            "by_source": self._by_source.save(self._layers, self._take_all, True),
        }

    def load(self, state: dict[str, Any]) -> None:
        if self._layers is not None:
            self._take_all(self._layers)
        self._recorded.load(state.get("recorded", []))
        self._by_source.load(state.get("by_source", []))

    def _take_all(self, layers: Layers) -> list[int]:
        indices = experts_of(layers.modules)
        self._take(layers, indices)
        return indices

    def _take(self, layers: Layers, indices: Sequence[int]) -> dict[int, Tensor]:
        """Asks this rank's layers for their counts. A layer without tokens is left out."""
        counted = {
            index: load
            for index, load in Counts.of(layers, indices, self._counted).items()
            if isinstance(load, Tensor)
        }
        before = 0 if layers.spread is None else self._experts * layers.spread.place
        behind = self._experts * (self._ranks - 1) - before
        by_source = {
            index: functional.pad(load, (before, behind)) for index, load in counted.items()
        }
        self._recorded.add(by_source)
        if self._ranks > 1:
            self._by_source.add(by_source)
        return counted

    def _counted(self, module: nn.Module) -> tuple[()] | Tensor:
        router = _router(module)
        load, router.load = router.load, 0
        return load if isinstance(load, Tensor) else ()  # no token since the last call

    def _move_biases(self, layers: Layers, indices: Sequence[int], last: Counts) -> None:
        rows = last.total(
            layers, indices, "the load of every expert in the last step", all_replicas=True
        )
        own = set(layers.own) - layers.frozen
        for index, row in zip(indices, rows, strict=True):
            if index in own:
                load = torch.tensor(row, dtype=torch.float64)
                bias: Tensor = _router(layers.modules[index]).bias
                bias += (self._rate * torch.sign(load.mean() - load)).to(bias)


def _hottest(load: Sequence[float]) -> float:
    """Returns the largest load over the mean."""
    return max(load) * len(load) / total if (total := sum(load)) else 0.0


def _unused(load: Sequence[float]) -> float:
    """Returns the share of the experts without a token."""
    return sum(not count for count in load) / len(load)


def _router(module: nn.Module) -> Any:
    """Returns the router of a layer. Any class that has `load` will do."""
    return getattr(module, "router", None)


def experts_of(modules: Sequence[nn.Module]) -> list[int]:
    """Returns the layers with experts: they have an attribute `router` with a `load`."""
    return layers_that(
        lambda module: hasattr(_router(module), "load"),
        modules,
        "experts, but no layer of the model has experts; give one of your own an attribute "
        "`router` with a `load`, as dynmo.cases.experts.layers.ExpertsHalf has",
    )


def make(options: Experts, run: RunFacts) -> Dynamism:
    """Makes the case. `check` counts the experts of a model of the user's own."""
    model = run.model
    if model is None or model.kind == "hf":
        return ExpertsCase(options, 0, 0.0, run.expert, options.redundant)
    rate = model.bias_rate if model.kind == "moe" and model.routing == "bias" else 0.0
    return ExpertsCase(options, model.experts, rate, run.expert, run.most_groups(model.experts))
