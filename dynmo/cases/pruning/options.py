"""Options of Pruning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field

from dynmo.extend import CaseOptions, Count, RunFacts, Whole


def _check_shape(value: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", value):
        raise ValueError("must be rows x columns, like 256x1024")
    return value


Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Shape: TypeAlias = Annotated[str, AfterValidator(_check_shape)]
DenseBelow: TypeAlias = Literal["auto", "measured"] | Share | dict[Shape, Share]


class Pruning(CaseOptions):
    """Weights of least magnitude become zero, by a cubic schedule."""

    name: ClassVar[str] = "pruning"
    turn: ClassVar[int] = 1

    criterion: Literal["global", "local"] = "global"
    """Weights that are compared: those of all layers, or those of each layer."""
    initial_sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of zero weights at `start`."""
    final_sparsity: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of zero weights at `end`."""
    start: Whole | None = None
    """First step that prunes. Not set: after 30 % of the run."""
    end: Whole | None = None
    """Last step that prunes. Not set: after 70 % of the run."""
    every: Count | None = None
    """Steps between two prunings. Not set: a quarter of the time from `start` to `end`."""
    dense_below: DenseBelow = "auto"
    """Sparsity below which a matrix stays dense: a share, a table of shares by shape, `measured`
    (timed once per machine and shape), or `auto` (0.75 on CPU, measured on CUDA)."""

    def steps_of(self, steps: int | None) -> tuple[int, int, int]:
        """`start`, `end` and `every` in a run of so many steps."""
        if self.start is not None and self.end is not None:
            start, end = self.start, self.end
        else:
            assert steps is not None, "`problems` asks for the steps"
            start = 3 * steps // 10 if self.start is None else self.start
            end = min(steps - 1, max(start, 7 * steps // 10)) if self.end is None else self.end
        return start, end, max(1, (end - start) // 4) if self.every is None else self.every

    def measured(self, before: Pruning) -> dict[str, Any]:
        keeps = self.dense_below in ("auto", "measured") and isinstance(before.dense_below, dict)
        return {"dense_below": before.dense_below} if keeps else {}

    @classmethod
    def compile_ahead(cls) -> None:
        crossover = import_module(".crossover", __package__)
        crossover.seconds(crossover.make_pruned(8, 8, 0.5), tokens=4, repeats=1)

    def problems(self, run: RunFacts) -> Iterator[str]:
        key = "dynamism.pruning"
        if run.model is not None and run.model.kind == "emulated":
            yield (
                f'{key}: an emulated model has no weights to prune; use model.kind = "gpt", or '
                "leave the case out"
            )
        if self.initial_sparsity > self.final_sparsity:
            yield (
                f"{key}.initial_sparsity = {self.initial_sparsity} is over final_sparsity = "
                f"{self.final_sparsity}; pruned weights do not return, so use at most that"
            )
        if run.steps is None and (self.start is None or self.end is None):
            yield f"{key}: give start and end, or the steps of the run (steps=)"
            return
        start, end, every = self.steps_of(run.steps)
        for name, step in (("start", start), ("end", end)):
            if run.steps is not None and step >= run.steps:
                yield (
                    f"{key}.{name} = {step}: the run has {run.steps} steps, so it would not prune "
                    f"to the end; use at most {run.steps - 1}"
                )
                return
        if start > end:
            yield f"{key}.start = {start} is after end = {end}; prune from start to end"
        elif every > max(1, end - start):
            yield (
                f"{key}.every = {every} is more than the {end - start} steps from start = {start} "
                f"to end = {end}; use a smaller one"
            )
