"""Options of MixtureOfDepths."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dynmo.extend import CaseOptions, Count, NonNegative, RunFacts, Whole, needs_own_layers


def _chosen_tokens(run: RunFacts, case: str) -> Iterator[str]:
    """Yields the options that exclude a case that chooses tokens."""
    if "sparse_attention" in run.cases:
        yield (
            f'dynamism.cases: "{case}" and "sparse_attention" both say what attention '
            "computes; leave one of them out"
        )
    if getattr(run.cases.get("freezing"), "policy", None) == "egeria":
        yield (
            'dynamism.freezing.policy = "egeria" compares the outputs of a layer and its '
            f'reference, which choose other tokens under "{case}"; use "autofreeze" or a schedule'
        )
    if run.compiles:
        yield (
            f'train.compile = true with "{case}": shapes vary, and each would be compiled '
            "anew; use compile = false"
        )


class MixtureOfDepths(CaseOptions):
    """Some blocks let only a part of the tokens pass."""

    name: ClassVar[str] = "mixture_of_depths"
    turn: ClassVar[int] = 4

    capacity: Annotated[float, Field(gt=0, le=1)] = 0.125
    """Share of the tokens of a sequence that a routed block computes."""
    every: Count = 2
    """Every so many-th block is routed."""
    predictor: Literal["mlp", "bce"] = "mlp"
    """How the selection is predicted: by a small network with a stopped gradient, or by the
    router's own weight under a binary cross entropy."""
    predictor_weight: NonNegative = 0.01
    """Weight of the predictor's loss."""
    threshold_from: Whole | None = None
    """Step from which training selects tokens by the predictor. Not set: never, each sequence keeps
    its best tokens. Evaluation always selects by the predictor, which sees no later token."""
    record_every: Count = 10
    """Steps between two records of how many tokens each routed block computes."""

    def routed_blocks(self, blocks: int) -> tuple[int, ...]:
        return tuple(range(self.every - 1, blocks, self.every))

    def problems(self, run: RunFacts) -> Iterator[str]:
        key, model = "dynamism.mixture_of_depths", run.model
        yield from needs_own_layers(run, "mixture_of_depths", "tokens to select")
        yield from _chosen_tokens(run, "mixture_of_depths")
        if "early_exit" in run.cases:
            yield (
                'dynamism.cases: "early_exit" and "mixture_of_depths" both choose tokens for a '
                "block; leave one of them out"
            )
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
