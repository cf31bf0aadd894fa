"""Options of Experts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, ClassVar

from pydantic import Field

from dynmo.extend import CaseOptions, Count, RunFacts, Whole


class Experts(CaseOptions):
    """Measures the load of experts, and places them on the replicas that share them."""

    name: ClassVar[str] = "experts"
    turn: ClassVar[int] = 5

    record_every: Count = 10
    """Steps between two records of the experts' load."""
    place_every: Whole = 20
    """Steps between two decisions where experts go (`parallel.expert` over 1). 0: they stay."""
    redundant: Whole = 0
    """Experts that a replica may hold besides its equal part. Hot experts are copied there."""
    least_gain: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Experts move if the load of the busiest replica then falls by at least this share."""

    def hugging_face_layers(self, kinds: Any) -> Any:
        return import_module(".hugging_face", __package__).layers_of(kinds)

    @classmethod
    def compile_ahead(cls) -> None:
        routing = import_module(".routing", __package__)
        routing.compile_ahead()

    @property
    def spare_groups(self) -> int:
        return self.redundant

    @classmethod
    def model_problems(cls, run: RunFacts) -> Iterator[str]:
        model, tokens = run.model, run.tokens
        if model is None or model.kind != "moe":
            return
        room = math.inf if model.capacity_factor is None else model.capacity_factor * model.top_k
        if tokens is not None and room * tokens < model.experts:
            least = math.ceil(10000 * model.experts / tokens / model.top_k) / 10000
            yield (
                f"model.capacity_factor = {model.capacity_factor} leaves an expert room for no "
                f"token of a microbatch of {tokens}; use {least} or more"
            )
        if model.routing == "bias" and cls.name not in run.cases:
            yield (
                'model.routing = "bias" needs the load of the experts, which dynamism.cases = '
                '["experts"] measures; add it'
            )
        if run.compiles:
            yield (
                'train.compile = true with model.kind = "moe": shapes vary, and each would be '
                "compiled anew; use compile = false"
            )

    def problems(self, run: RunFacts) -> Iterator[str]:
        model = run.model
        kinds = ("moe", "hf")
        if model is not None and model.kind not in kinds and not model.kind.startswith("python:"):
            yield (
                f'dynamism.cases: "experts", but model.kind = "{model.kind}" has no experts of '
                'dynmo; use model.kind = "moe"'
            )
