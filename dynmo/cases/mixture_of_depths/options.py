"""Options of MixtureOfDepths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from dynmo.extend import CaseOptions, Count, RunFacts, Whole


class MixtureOfDepths(CaseOptions):
    """Some blocks let only a part of the tokens pass."""

    name: ClassVar[str] = "mixture_of_depths"
    turn: ClassVar[int] = 4
    changes: ClassVar[str] = "attention"
    chooses_tokens: ClassVar[bool] = True

    capacity: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of the tokens of a sequence that a routed block computes."""
    every: Count = 2
    """Every so many-th block is routed."""
    predictor: Literal["mlp", "bce"] = "mlp"
    """How the selection is predicted: by a small network with a stopped gradient, or by the
    router's own weight under a binary cross entropy."""
    predictor_weight: Annotated[float, Field(ge=0)] = 0.01
    """Weight of the predictor's loss."""
    threshold_from: Whole | None = None
    """Step from which training selects tokens by the predictor. Not set: never, each sequence keeps
    its best tokens. Evaluation always selects by the predictor, which sees no later token."""
    record_every: Count = 10
    """Steps between two records of how many tokens each routed block computes."""

    def gpt_layers(self, layers: Any) -> Any:
        return import_module(".layers", __package__).gpt_layers(self, layers)

    def hugging_face_layers(self, kinds: Any) -> Any:
        return import_module(".hugging_face", __package__).layers_of(self, kinds)

    def routed_blocks(self, blocks: int) -> tuple[int, ...]:
        return tuple(range(self.every - 1, blocks, self.every))

    def problems(self, run: RunFacts) -> Iterator[str]:
        key, model = "dynamism.mixture_of_depths", run.model
        yield from super().problems(run)
        if model is not None and model.is_gpt and self.every > model.blocks:
            yield (
                f"{key}.every = {self.every} routes none of the model's {model.blocks} blocks; "
                f"use {model.blocks} or less"
            )
        if model is not None and self.capacity * model.sequence < 0.5:
            least = math.ceil(5000 / model.sequence) / 10000
            yield (
                f"{key}.capacity = {self.capacity} selects no token of model.sequence = "
                f"{model.sequence}; use {least} or more"
            )
        late = self.threshold_from
        if late is not None and run.steps is not None and late >= run.steps:
            yield (
                f"{key}.threshold_from = {late}, but the run has {run.steps} steps; use less, or "
                "leave it out"
            )
