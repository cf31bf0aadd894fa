"""Mixture of experts: measures the load of the experts (DynMo 2.2).

The layers do the work (`dynmo.models.experts`). The case records how uneven the load is. With
`model.routing = "bias"` it also moves the bias of each expert against its load, by the counts of
all replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from dynmo.dynamism.case import Change, Dynamism, Layers, Signals, TokenShares
from dynmo.dynamism.counts import Counts, counts_of
from dynmo.errors import ConfigError


@final
class MoeCase(Dynamism):
    """Counts tokens by expert.

    Args:
        experts: Number of experts of a layer.
        bias_rate: By how much a step changes a bias. 0 changes none.
        record_every: Steps between two records.
    """

    name = "moe"

    def __init__(self, experts: int, bias_rate: float, record_every: int) -> None:
        self._experts, self._rate, self._every = experts, bias_rate, record_every
        self._recorded = Counts(experts)
        self._layers: Layers | None = None

    def check(self, modules: Sequence[nn.Module]) -> None:
        experts_of(modules)

    def act(self, step: int, layers: Layers) -> Change | None:
        self._layers = layers
        return None

    def acts(self, step: int) -> bool:
        return step > 0 and (self._rate > 0 or self._records(step))

    def _records(self, step: int) -> bool:
        return step > 0 and step % self._every == 0

    def collect(self, step: int, layers: Layers) -> TokenShares | None:
        indices = experts_of(layers.modules)
        self._recorded.add(counts_of(layers, indices, self._counted))
        if not self._records(step):
            return None
        rows = self._recorded.total(layers, indices, "the load of every expert")
        return TokenShares(tuple(indices), {"hottest expert": [_hottest(row) for row in rows], "unused": [_unused(row) for row in rows]})

    def observe(self, signals: Signals) -> None:
        """Moves the biases as soon as a step is final: a checkpoint behind it has the new ones."""
        layers = self._layers
        if not self._rate or layers is None:
            return
        indices = experts_of(layers.modules)
        last, counted = Counts(self._experts), counts_of(layers, indices, self._counted)
        last.add(counted)
        self._recorded.add(counted)
        self._move_biases(layers, indices, last)

    def _counted(self, module: nn.Module) -> Tensor:
        router = _router(module)
        load, router.load = router.load, 0
        return load if isinstance(load, Tensor) else torch.zeros(self._experts)

    def _move_biases(self, layers: Layers, indices: Sequence[int], last: Counts) -> None:
        rows = last.total(layers, indices, "the load of every expert in the last step", all_replicas=True)
        own = set(layers.own) - layers.frozen
        for index, row in zip(indices, rows, strict=True):
            if index in own:
                load = torch.tensor(row, dtype=torch.float64)
                bias: Tensor = _router(layers.modules[index]).bias
                bias += (self._rate * torch.sign(load.mean() - load)).to(bias)


def _hottest(load: Sequence[float]) -> float:
    """The largest load over the mean."""
    return max(load) * len(load) / total if (total := sum(load)) else 0.0


def _unused(load: Sequence[float]) -> float:
    """Share of the experts without a token."""
    return sum(not count for count in load) / len(load)


def _router(module: nn.Module) -> Any:
    """Of any class that has `load`."""
    return getattr(module, "router", None)


def experts_of(modules: Sequence[nn.Module]) -> list[int]:
    """Returns the layers with experts: they have an attribute `router` with a `load`.

    Raises:
        ConfigError: There is none.
    """
    indices = [index for index, module in enumerate(modules) if hasattr(_router(module), "load")]
    if not indices:
        raise ConfigError(
            "dynamism.cases: moe, but no layer of the model has experts; give one of your own an attribute `router` with a `load`, "
            "as dynmo.models.experts.ExpertsHalf has"
        )
    return indices


def make(config: Any, layers: int) -> Dynamism:
    """From `[dynamism.moe]`."""
    model = config.model
    rate = model.bias_rate if model.kind == "moe" and model.routing == "bias" else 0.0
    return MoeCase(model.experts, rate, config.dynamism.moe.record_every)
