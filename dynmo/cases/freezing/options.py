"""Options of Freezing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias, cast

from pydantic import AfterValidator, Field, model_validator

from dynmo.extend import Bytes, CaseOptions, Count, RunFacts, Whole


def _check_pairs(value: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    for (step, layers), (next_step, next_layers) in itertools.pairwise(value):
        if next_step <= step or next_layers < layers:
            raise ValueError(
                f"[{next_step}, {next_layers}] after [{step}, {layers}]: steps must ascend, and "
                "frozen layers never be fewer"
            )
    return value


# Values that change at given steps. The steps ascend.
if TYPE_CHECKING:
    FrozenAt: TypeAlias = Sequence[Sequence[int]]
else:
    FrozenAt = Annotated[
        tuple[Annotated[tuple[Whole, Whole], Field(strict=False)], ...],
        Field(strict=False),
        AfterValidator(_check_pairs),
    ]


class Freezing(CaseOptions):
    """Leading layers stop training. A given `schedule` sets the policy to "schedule"."""

    name: ClassVar[str] = "freezing"
    turn: ClassVar[int] = 6

    policy: Literal["schedule", "autofreeze", "egeria"] = "autofreeze"
    """Who decides what is frozen. If `schedule` is given, the default is `schedule`."""
    schedule: FrozenAt = ()
    """`[[step, layers], ...]`: from each step on, this number of leading layers is frozen."""
    every: Count = 10
    """Steps between two decisions of `autofreeze` or `egeria`."""
    start: Whole = 0
    """First step at which `autofreeze` or `egeria` may freeze."""
    max_layers: Count | None = None
    """Most layers that are frozen. Not set: all but the last."""
    unit: Literal["half", "block"] = "half"
    """Layers that freeze at once: half a block (one layer) or a whole block."""
    window: Annotated[int, Field(ge=2, le=1000)] = 5
    """Readings that `egeria` looks at, one each `every` steps."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """`egeria` freezes a layer that changes less than this share of its first rate of change."""
    refresh: Count = 200
    """Largest age, in steps, of the reference model of `egeria`."""
    thaw: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """`egeria` unfreezes all layers when the learning rate falls to this share of its value when
    the first layer froze."""
    cache_bytes: Bytes = 0
    """Host memory per rank for the outputs of frozen leading layers: bytes, or a size such as
    `"2GiB"`. A cached microbatch skips these layers. 0 caches nothing."""

    @model_validator(mode="before")
    @classmethod
    def _policy_of_a_schedule(cls, data: object) -> object:
        if isinstance(data, dict) and cast(dict[str, object], data).get("schedule"):
            return {"policy": "schedule", **cast(dict[str, object], data)}
        return cast(object, data)

    def problems(self, run: RunFacts) -> Iterator[str]:
        if run.expert > 1:
            yield from self._no_experts(f"parallel.expert = {run.expert}")
        if self.policy == "schedule":
            if not self.schedule:
                yield (
                    "dynamism.freezing.schedule is empty, so nothing would freeze; give [[step, "
                    'layers], ...] or policy = "autofreeze"'
                )
            key = "dynamism.freezing.schedule"
            most = max((count for _, count in self.schedule), default=0)
        else:
            key, most = "dynamism.freezing.max_layers", self.max_layers or 0
        if run.layers is not None and most >= run.layers:
            yield (
                f"{key} freezes {most} of the model's {run.layers} layers; the last must train, so "
                f"freeze at most {run.layers - 1}"
            )
        chosen = [case.name for case in run.cases.values() if case.chooses_tokens]
        if self.policy == "egeria" and chosen:
            yield (
                'dynamism.freezing.policy = "egeria" compares the outputs of a layer and its '
                f'reference, which choose other tokens under "{chosen[0]}"; use "autofreeze" or a '
                "schedule"
            )
        if self.policy == "egeria" and self.refresh < self.window * self.every:
            yield (
                f"dynamism.freezing.refresh = {self.refresh}: a reference must last a window of "
                f"{self.window} readings, one each {self.every} steps; use refresh = "
                f"{self.window * self.every} or more"
            )
        elif run.steps is not None and self.policy == "egeria":
            if self.first_stale_step(run.steps) is None:
                yield (
                    f"dynamism.freezing.window = {self.window}, every = {self.every}, start = "
                    f"{self.start}, refresh = {self.refresh}: nothing can freeze in a run of "
                    f"{run.steps} steps; start sooner, decide more often, or raise refresh"
                )
        elif run.steps is not None and (first := self._first_step) >= run.steps:
            named = (
                f"every = {self.every}, start = {self.start}"
                if self.policy == "autofreeze"
                else "schedule"
            )
            yield (
                f"dynamism.freezing.{named}: nothing can freeze before step {first}, but the run "
                f"has {run.steps} steps; start sooner, or decide more often"
            )
        if self.cache_bytes:
            yield from self._no_cache(run)

    def _no_experts(self, key: str) -> Iterator[str]:
        """Yields that replicas that share experts must run the same layers."""
        if self.policy == "egeria":
            yield (
                f'{key}: dynamism.freezing.policy = "egeria" runs layers of one replica '
                'alone; use "autofreeze" or a schedule'
            )
        if self.cache_bytes:
            yield (
                f"{key}: a replica that finds an output in its cache sends no rows; use "
                "dynamism.freezing.cache_bytes = 0"
            )

    @property
    def _first_step(self) -> int:
        """The first step before which `schedule` or `autofreeze` can freeze something."""
        if self.policy == "schedule":
            return self.schedule[0][0] if self.schedule else 0
        return self.start + 2 * self.every

    def _no_cache(self, run: RunFacts) -> Iterator[str]:
        """Yields that a frozen layer gives another output each time, or is not asked again."""
        key = f"dynamism.freezing.cache_bytes = {self.cache_bytes}"
        if run.model is not None and run.model.dropout:
            yield (
                f"{key} with model.dropout = {run.model.dropout}: what is dropped is another "
                "each time; use cache_bytes = 0 or dropout = 0"
            )
        if "sparse_attention" in run.cases:
            yield (
                f'{key} with the case "sparse_attention", which draws anew at each step; use '
                "cache_bytes = 0, or leave the case out"
            )
        if run.comes_again is False:
            yield (
                f"{key}: no microbatch comes again in this run, so nothing would be cached; "
                "evaluate text at least twice (train.eval_every), train on it for more than an "
                'epoch with data.shuffle = "batches", or use cache_bytes = 0'
            )

    def first_stale_step(self, steps: int) -> int | None:
        """The first step before which Egeria can freeze a module. None: none of the run's.

        Egeria needs `window` slopes after the first one, which they are compared with. A reading
        uses the last reference taken before its step. Each reference begins a new curve, whose
        first window has no slope.
        """
        slopes = readings = reference = 0
        for offset in range(self.every, steps - self.start - 1, self.every):
            latest = (offset - 1) // self.refresh
            readings = 1 if latest != reference else readings + 1
            reference = latest
            slopes += readings >= self.window
            if slopes > self.window:
                return self.start + offset + 1
        return None
