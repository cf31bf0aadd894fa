"""Options of the layers that a rank holds, and of the work that replicas share."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerOptions:
    """How the layers of a run compute.

    Attributes:
        seed: Seed of the layers' random numbers while training.
        compiles: Whether torch.compile runs the layers.
        head_tokens: Most tokens that the last layer and the loss compute at once. None means all.
    """

    dtype: torch.dtype = torch.float32
    seed: int = 0
    compiles: bool = False
    head_tokens: int | None = None


@dataclass(frozen=True)
class ReplicaOptions:
    """The work that replicas share, and the groups in which gradients are summed.

    Attributes:
        accumulation_groups: Number of groups in which the gradients of all pipelines' microbatches
            are summed. None means one group per replica.
        zero: 1 shares the optimizer's state over the replicas (ZeRO-1). 0 shares nothing.
        expert: Number of replicas that share one set of experts.
        replicates: Whether a reshape may make replicas later.
    """

    accumulation_groups: int | None = None
    zero: int = 0
    expert: int = 1
    replicates: bool = False

    def groups(self, replicas: int) -> int:
        """Returns the accumulation groups of a mesh that starts with these replicas."""
        return self.accumulation_groups or replicas
