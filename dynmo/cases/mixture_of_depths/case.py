"""Mixture of depths: some blocks compute only the tokens that a router selects.

Source: DynMo 2.2. The layers do the work (`dynmo.models.mixture_of_depths`). The case decides from
which step on training selects by the predictor, and records the selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import nn

from dynmo.cases.mixture_of_depths import MixtureOfDepths
from dynmo.pipeline.case import Change, Dynamism, Layers, TokenShares, layers_that
from dynmo.pipeline.case_options import RunFacts
from dynmo.pipeline.counts import Counts, counts_of


@final
class MixtureOfDepthsCase(Dynamism):
    """Switches the routers."""

    name = "mixture_of_depths"

    def __init__(self, threshold_from: int | None, record_every: int) -> None:
        self._from, self._every = threshold_from, record_every
        self._by_threshold, self._counts = False, Counts(3)
        self._layers: Layers | None = None

    def check(self, modules: Sequence[nn.Module]) -> None:
        routed_of(modules)

    def act(self, step: int, layers: Layers) -> Change | None:
        self._layers = layers
        before, self._by_threshold = self._by_threshold, self._wanted(step)
        routed = routed_of(layers.modules)
        for index in routed:
            _router(layers.modules[index]).by_threshold = self._by_threshold
        if before == self._by_threshold:
            return None
        # Both halves of a routed block compute the selected tokens only.
        changed = sorted({place for index in routed for place in (index, index + 1)})
        return Change(
            tuple(changed), f"{len(routed)} blocks select tokens by their predictors (step {step})"
        )

    def acts(self, step: int) -> bool:
        return self._wanted(step) != self._by_threshold or self._records(step)

    def _wanted(self, step: int) -> bool:
        return self._from is not None and step >= self._from

    def _records(self, step: int) -> bool:
        return step > 0 and step % self._every == 0

    def collect(self, step: int, layers: Layers) -> TokenShares | None:
        self._layers = layers
        routed = self._take(layers)
        if not self._records(step):
            return None
        rows = self._counts.total(layers, routed, "the tokens of every router")
        names = ("selected", "predicted_right")
        shares = {
            name: [row[1 + i] / row[0] if row[0] else 0.0 for row in rows]
            for i, name in enumerate(names)
        }
        return TokenShares(tuple(routed), shares)

    def _take(self, layers: Layers) -> list[int]:
        """Asks the layers for their counts."""
        routed = routed_of(layers.modules)
        self._counts.add(counts_of(layers, routed, _counted))
        return routed

    def state(self) -> dict[str, Any]:
        counts = self._counts.save(self._layers, self._take, all_replicas=False)
        return {"by_threshold": self._by_threshold, "counts": counts}

    def load(self, state: dict[str, Any]) -> None:
        self._by_threshold = bool(state["by_threshold"])
        if self._layers is not None:
            self._take(self._layers)
        self._counts.load(state.get("counts", []))


def _router(module: nn.Module) -> Any:
    """Returns the router: any class with `by_threshold` and `seen` will do."""
    return getattr(module, "router", None)


def _counted(module: nn.Module) -> tuple[float, float, float]:
    router = _router(module)
    seen, router.seen = router.seen, (0, 0, 0)
    return seen


def routed_of(modules: Sequence[nn.Module]) -> list[int]:
    """Returns the layers that select tokens: they have an attribute `router`."""
    return layers_that(
        lambda module: hasattr(_router(module), "by_threshold"),
        modules,
        "mixture_of_depths, but no layer of the model selects tokens; give one of your own an "
        "attribute `router`, as dynmo.cases.mixture_of_depths.layers.RoutedAttentionHalf has",
    )


def make(options: MixtureOfDepths, run: RunFacts) -> Dynamism:
    del run
    return MixtureOfDepthsCase(options.threshold_from, options.record_every)
