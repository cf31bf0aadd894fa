"""Mixture of depths: some blocks compute only the tokens that a router selects.

Source: DynMo 2.2. The layers do the work (`layers.py`). The case decides from which step on
training selects by the predictor, and records the selected tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from torch import nn

from dynmo import Change, Layers
from dynmo.cases.mixture_of_depths.options import MixtureOfDepths
from dynmo.extend import CountingCase, RunFacts, layers_that


@final
class MixtureOfDepthsCase(CountingCase):
    """Switches the routers."""

    name = "mixture_of_depths"

    def __init__(self, threshold_from: int | None, record_every: int) -> None:
        super().__init__(3, record_every)
        self._from, self._by_threshold = threshold_from, False

    def counting(self, modules: Sequence[nn.Module]) -> list[int]:
        return layers_that(
            lambda module: hasattr(getattr(module, "router", None), "by_threshold"),
            modules,
            "mixture_of_depths, but no layer of the model selects tokens; give load_model or "
            "from_pretrained the cases, too, or a layer of your own an attribute `router`, as "
            "dynmo.cases.mixture_of_depths.layers.RoutedAttentionHalf has",
        )

    def counted(self, module: Any) -> tuple[float, float, float]:
        seen, module.router.seen = module.router.seen, (0, 0, 0)
        return seen

    def shares(self, rows: list[list[float]]) -> dict[str, list[float]]:
        names = ("selected", "predicted_right")
        return {
            name: [row[i] / row[0] if row[0] else 0.0 for row in rows]
            for i, name in enumerate(names, 1)
        }

    def act(self, step: int, layers: Layers) -> Change | None:
        super().act(step, layers)
        before, self._by_threshold = self._by_threshold, self._wanted(step)
        routed = self.counting(layers.modules)
        for index in routed:
            # The router of any class will do.
            router: Any = layers.modules[index].router
            router.by_threshold = self._by_threshold
        if before == self._by_threshold:
            return None
        # Both halves of a routed block compute the selected tokens only.
        changed = sorted({place for index in routed for place in (index, index + 1)})
        return Change(
            tuple(changed), f"{len(routed)} blocks select tokens by their predictors (step {step})"
        )

    def acts(self, step: int) -> bool:
        return self._wanted(step) != self._by_threshold or self.records(step)

    def _wanted(self, step: int) -> bool:
        return self._from is not None and step >= self._from

    def state(self) -> dict[str, Any]:
        return {"by_threshold": self._by_threshold, **super().state()}

    def load(self, state: dict[str, Any]) -> None:
        self._by_threshold = bool(state["by_threshold"])
        super().load(state)


def make(options: MixtureOfDepths, run: RunFacts) -> MixtureOfDepthsCase:
    del run
    return MixtureOfDepthsCase(options.threshold_from, options.record_every)
