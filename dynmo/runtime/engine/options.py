"""Options of an `Engine`: the ops of a step, and the end of a step.

The options of layers and replicas are in `runtime/state/layer_options.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, cast

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import ConfigError
from dynmo.plan.partition import Layouts, Partition, RecomputeRule
from dynmo.runtime.optim.loss_scale import LossScaler
from dynmo.runtime.optim.parameter_groups import Settings
from dynmo.schedule.memory import Limit

Shapes = Callable[[int], tuple[LayerCost, ...] | None]
"""Takes the number of replicas and returns the layers' bytes on one of them, from shapes alone.

Returns None if shapes do not tell."""


@dataclass(frozen=True)
class StepOptions:
    """The ops of a step, and their order on the ranks.

    Attributes:
        microbatches: Microbatches of a step of one pipeline.
        chunks: Stages per rank. None means the schedule's own number.
        alternatives: Schedules that may take the place of the first one between steps.
        slices: Number of slices of this process's GPU that are the pipeline's ranks. The world then
            has one rank, and layers move between slices without a message. None means that the
            ranks of the world are the pipeline's.
        memory_limit: Bytes of a rank, or of each, for schedules that are made within a limit.
        recompute: Indices of the layers whose activations are recomputed in B. Or a pure function
            of a placement, the schedule with every stage training, and the number of replicas.
        shapes: Costs by shapes alone. Schedules within `memory_limit` are made from them until
            costs are measured.
    """

    schedule: str
    microbatches: int
    chunks: int | None = None
    alternatives: tuple[str, ...] = ()
    slices: int | None = None
    memory_limit: Limit = None
    recompute: RecomputeRule = ()
    shapes: Shapes | None = None

    def layouts(self, layers: int, accumulation_groups: int) -> Layouts:
        """Returns the layouts that these steps allow, with groups of the whole mesh."""
        return Layouts(
            layers,
            self.schedule,
            self.chunks,
            accumulation_groups,
            self.recompute,
            sliced=self.slices is not None,
            shapes=self.alternatives,
        )


@dataclass(frozen=True)
class UpdateOptions:
    """The end of a step: clipping, the optimizer, and the way to take a step back.

    Attributes:
        clip_scope: "global" clips by the norm of all layers, "local" each layer by its own.
        scaler: Scale of the loss. None means a dynamic scale in float16, and no scale otherwise.
        post_validation: True if steps have no barrier at their end. See `Engine.advance`.
        rollback: The way to take a step back. "exact" restores copies. "in-place" inverts the
            update without copies and is approximate. A user's optimizer keeps copies anyway.
    """

    optimizer: Settings = field(default_factory=Settings)
    clip_scope: Literal["global", "local"] = "global"
    scaler: LossScaler | None = None
    post_validation: bool = False
    rollback: Literal["exact", "in-place"] = "exact"

    def __post_init__(self) -> None:
        check_choice("rollback", self.rollback, ("exact", "in-place"))
        check_choice("clip_scope", self.clip_scope, ("global", "local"))


def check_partition(partition: object) -> None:
    if not isinstance(partition, Partition):
        raise ConfigError(
            f"partition is a {type(partition).__name__}; give a Partition, such as Partition((4, "
            "4))"
        )


def check_recompute(recompute: object, layers: int) -> None:
    if callable(recompute):
        return
    if isinstance(recompute, str) or not isinstance(recompute, Collection):
        raise ConfigError(
            f"recompute = {recompute!r}; give the indices of layers, range({layers}) for all, or "
            "a function"
        )
    outside = [index for index in cast(Collection[object], recompute) if index not in range(layers)]
    if outside:
        raise ConfigError(
            f"recompute names layer {outside[0]!r}, but the model has {layers}, from 0 to "
            f"{layers - 1}"
        )


def check_choice(option: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{option} = {value!r}; choose from {', '.join(allowed)}")
