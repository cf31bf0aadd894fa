"""Options of Experts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import ClassVar

from dynmo.extend import BelowOne, CaseOptions, Count, RunFacts, Whole


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
    least_gain: BelowOne = 0.05
    """Experts move if the load of the busiest replica then falls by at least this share."""

    @classmethod
    def compile_ahead(cls) -> None:
        import_module("dynmo.models.experts").compile_ahead()

    @property
    def spare_groups(self) -> int:
        return self.redundant

    def problems(self, run: RunFacts) -> Iterator[str]:
        model = run.model
        if model is not None and model.kind != "moe" and not model.kind.startswith("python:"):
            yield (
                f'dynamism.cases: "experts", but model.kind = "{model.kind}" has no experts of '
                'dynmo; use model.kind = "moe"'
            )
