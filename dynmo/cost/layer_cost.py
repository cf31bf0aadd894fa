"""The cost of a layer (`LayerCost`), a stage (`StageCost`) and a link.

Measured costs are in seconds and bytes. Costs given by hand are in any one unit of time. Their
memory is in units of one stage's forward activations.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate, pairwise


def most_pending_gradients(accumulation_groups: int) -> int:
    """The most gradients of one parameter that wait for their sum.

    They wait while the next accumulation group is summed. Groups fold as a binary tree
    (`runtime/layer/accumulation.py`), in which a finished group waits for its neighbour.
    """
    return max(finished.bit_count() for finished in range(accumulation_groups))


@dataclass(frozen=True)
class LayerCost:
    """The cost of one layer for one microbatch: seconds of F, B and W, and bytes.

    Args:
        f: Seconds of F. A layer in a frozen prefix has b = w = 0. A frozen layer above a trainable
            one has w = 0 only.
        b: Seconds of B.
        w: Seconds of W.
        parameters: Number of parameters.
        weight_bytes: Bytes of the weights.
        gradient_bytes: Bytes of their gradients.
        optimizer_bytes: Bytes of the optimizer's state.
        activation_bytes: Live from F until B.
        stash_bytes: The part of the activations (inputs and output gradients) that W still needs
            after B.
        output_bytes: Bytes that the layer hands on.
        workspace_bytes: Bytes that B needs beside all this while it runs.
        forward_workspace_bytes: The same for F, if it keeps what B needs.
        weight_workspace_bytes: The same for W.
        rollback_bytes: Bytes that a step without a barrier keeps until it is final. With them
            the step can be taken back.
        pending_gradient_bytes: Gradients of finished accumulation groups that wait to be summed.

    Example:
        >>> LayerCost(f=0.01, b=0.01, w=0.02, weight_bytes=400).static_bytes
        400
    """

    f: float
    b: float
    w: float
    parameters: int = 0
    weight_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    stash_bytes: int = 0
    output_bytes: int = 0
    workspace_bytes: int = 0
    forward_workspace_bytes: int = 0
    weight_workspace_bytes: int = 0
    rollback_bytes: int = 0
    pending_gradient_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.f + self.b + self.w

    @property
    def static_bytes(self) -> int:
        """Bytes that are held at all times, counted as if all stayed from step to step."""
        return (
            self.weight_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.rollback_bytes
            + self.pending_gradient_bytes
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes that travel when the layer changes ranks."""
        return self.weight_bytes + self.optimizer_bytes

    def shared(self, replicas: int) -> LayerCost:
        """The cost on one of `replicas` replicas that share the optimizer's state (ZeRO-1)."""
        return replace(
            self,
            optimizer_bytes=-(-self.optimizer_bytes // replicas),
            rollback_bytes=-(-self.rollback_bytes // replicas),
        )

    def with_accumulation(self, accumulation_groups: int) -> LayerCost:
        return replace(
            self,
            pending_gradient_bytes=most_pending_gradients(accumulation_groups)
            * self.gradient_bytes,
        )


@dataclass(frozen=True)
class Forecast:
    """The cost that a case expects of some layers from a step on.

    A later forecast of the same case for a layer replaces an earlier one.

    Attributes:
        step: The first step with these costs.
        layers: Indices of the layers.
        f: Seconds of F, as a factor of what F takes now.
        b: Likewise for B.
        w: Likewise for W.
    """

    step: int
    layers: tuple[int, ...]
    f: float = 1.0
    b: float = 1.0
    w: float = 1.0


@dataclass(frozen=True)
class StageCost:
    """The cost of one stage for one microbatch.

    Attributes:
        mem_f: Change of live memory at F. The three changes sum to 0.
    """

    f: float
    b: float
    w: float
    mem_f: float = 1.0
    mem_b: float = -0.5
    mem_w: float = -0.5

    @property
    def seconds(self) -> float:
        return self.f + self.b + self.w

    @property
    def held(self) -> float:
        """The most memory that one microbatch holds: before B, or before W if B recomputes."""
        return max(self.mem_f, self.mem_f + self.mem_b)


@dataclass(frozen=True)
class Costs:
    """The costs of the stages, and the link time of each boundary between them."""

    stages: tuple[StageCost, ...]
    links: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.links) == max(0, len(self.stages) - 1)
        times = (*self.links, *(time for x in self.stages for time in (x.f, x.b, x.w)))
        assert all(0 <= time < math.inf for time in times), "a time is a number of at least 0"


def uniform_costs(
    stages: int, f: float, b: float, w: float, comm: float = 0.0, w_memory: float = 0.5
) -> Costs:
    """Returns the costs of a pipeline of equal stages.

    `w_memory` is the share of a forward's activations that stays until W has run.
    """
    stage = StageCost(f, b, w, 1.0, w_memory - 1.0, -w_memory)
    return Costs((stage,) * stages, (comm,) * max(0, stages - 1))


def split_costs(costs: Costs, stage_ranks: Sequence[int]) -> Costs:
    """Splits the costs of ranks, one stage each, over several stages on each rank.

    Each stage gets an equal part of the times and memory of its rank. The link between two stages
    is the slowest of the links between their ranks. It costs nothing if they share a rank.
    """
    parts = [stage_ranks.count(rank) for rank in range(len(costs.stages))]
    stages = tuple(_part(costs.stages[rank], parts[rank]) for rank in stage_ranks)
    links = tuple(
        max(costs.links[min(pair) : max(pair)], default=0.0) for pair in pairwise(stage_ranks)
    )
    return Costs(stages, links)


def _part(stage: StageCost, parts: int) -> StageCost:
    return StageCost(*(value / parts for value in astuple(stage)))


def elide(
    layers: Sequence[LayerCost], first_trainable: int, frozen: Collection[int]
) -> tuple[LayerCost, ...]:
    """Takes away the work that freezing spares.

    The layers before `first_trainable` lose B, W, activations and stash. Other layers of `frozen`
    lose W and stash.
    """
    out: list[LayerCost] = []
    for index, layer in enumerate(layers):
        if index < first_trainable:
            layer = replace(layer, b=0.0, w=0.0, activation_bytes=0, stash_bytes=0)
        elif index in frozen:
            layer = replace(layer, w=0.0, stash_bytes=0)
        out.append(layer)
    return tuple(out)


def stage_costs(layers: Sequence[LayerCost], counts: Sequence[int]) -> tuple[StageCost, ...]:
    """Sums layers into contiguous stages.

    Simulator, scheduler and balancers all use this one cost function.
    """
    assert sum(counts) == len(layers)
    out: list[StageCost] = []
    for start, stop in pairwise(accumulate(counts, initial=0)):
        own = layers[start:stop]
        activation = float(sum(x.activation_bytes for x in own))
        stash = float(sum(x.stash_bytes for x in own))
        out.append(
            StageCost(
                math.fsum(x.f for x in own),
                math.fsum(x.b for x in own),
                math.fsum(x.w for x in own),
                activation,
                stash - activation,
                -stash,
            )
        )
    return tuple(out)


@dataclass(frozen=True)
class LinkCost:
    """The cost of a link: a fixed time, and a time per byte.

    Attributes:
        latency: Seconds of an empty message.
    """

    latency: float
    bytes_per_second: float

    def seconds(self, size: int) -> float:
        return self.latency + (size / self.bytes_per_second if size else 0.0)

    def ring_seconds(self, size: float, ranks: int) -> float:
        """Seconds of one pass around a ring: a reduce-scatter or an all-gather.

        An all-reduce is two passes. `size` is that of the whole tensor, in bytes.
        """
        if ranks == 1 or not size:
            return 0.0
        return (ranks - 1) * self.latency + (ranks - 1) / ranks * size / self.bytes_per_second
