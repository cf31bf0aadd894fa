"""`EngineOptions`: how an engine trains, from the order of its ops to the kernels of a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.partition import Layouts, RecomputeRule
from dynmo.runtime.optim.parameter_groups import OptimizerSettings
from dynmo.runtime.optim.precision import LossScaler
from dynmo.schedule.memory import Limit

Shapes = Callable[[int], tuple[LayerCost, ...] | None]
"""Takes the number of replicas and returns the layers' bytes on one of them, from shapes alone.

Returns None if shapes do not tell."""


@dataclass(frozen=True)
class EngineOptions:
    """How an engine trains.

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
        optimizer: Optimizer, and the options of groups of parameters.
        clip_scope: "global" clips by the norm of all layers, "local" each layer by its own.
        scaler: Scale of the loss. None means a dynamic scale in float16, and no scale otherwise.
        stop_after: Number of steps in a row that are not finite after which training ends.
        post_validation: True if steps have no barrier at their end. See `Engine.train`.
        rollback: The way to take a step back. "exact" restores copies. "in-place" inverts the
            update without copies and is approximate. A user's optimizer keeps copies anyway.
        dtype: Type of F, B and W.
        seed: Seed of the layers' random numbers while training.
        compiles: Whether torch.compile runs the layers.
        head_tokens: Most tokens that the last layer and the loss compute at once. None means all.
        accumulation_groups: Number of groups in which the gradients of all pipelines' microbatches
            are summed. None means one group per replica.
        zero: 1 shares the optimizer's state over the replicas (ZeRO-1). 0 shares nothing.
        expert: Number of replicas that share one set of experts.
        replicates: Whether a reshape may make replicas later.
    """

    schedule: str
    microbatches: int
    chunks: int | None = None
    alternatives: tuple[str, ...] = ()
    slices: int | None = None
    memory_limit: Limit = None
    recompute: RecomputeRule = ()
    shapes: Shapes | None = None
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    clip_scope: Literal["global", "local"] = "global"
    scaler: LossScaler | None = None
    stop_after: int = 10
    post_validation: bool = False
    rollback: Literal["exact", "in-place"] = "exact"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    compiles: bool = False
    head_tokens: int | None = None
    accumulation_groups: int | None = None
    zero: int = 0
    expert: int = 1
    replicates: bool = False

    def groups(self, replicas: int) -> int:
        """Returns the accumulation groups of a mesh that starts with these replicas."""
        return self.accumulation_groups or replicas

    def layouts(self, layers: int, replicas: int) -> Layouts:
        """Returns the layouts that are allowed, for a mesh that starts with these replicas."""
        return Layouts(
            layers,
            self.schedule,
            self.chunks,
            self.groups(replicas),
            self.recompute,
            sliced=self.slices is not None,
            shapes=self.alternatives,
        )
