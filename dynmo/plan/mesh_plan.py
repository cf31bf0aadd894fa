"""A mesh, the costs of one of its replicas, and a step's time with reductions.

Costs at another size of microbatch are in proportion to it (`scale_layers`). Under ZeRO-1 a rank
holds its part of one replica's optimizer state, ceil(bytes / replicas). The gradients cross a ring
without latency:

    zero = 0    all-reduce        2 (R - 1) / R x gradient bytes / bandwidth
    zero = 1    reduce-scatter      (R - 1) / R x gradient bytes / bandwidth
                all-gather          (R - 1) / R x weight bytes   / bandwidth

The all-reduce and the reduce-scatter of a layer begin when its last W ends. The all-gather begins
after the step's last op, and nothing hides it.

A rank reduces one layer after another, in the order in which their last W's end (within a stage:
from its last layer to its first). It works on meanwhile: the link takes no time from the ops. The
part that is not over by the end of the step's last op is `exposed`.

    rank 0   ... W W[a f a]                    last W of the stage: of f, then of a
             reductions     [ f ][ a ]         exposed: what lies beyond the step's end
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.cost.profile_file import TIMES, Profile
from dynmo.errors import PartitionError
from dynmo.plan.plan_request import Plan
from dynmo.plan.problem import Mesh
from dynmo.schedule.bounds import Objective
from dynmo.schedule.op import Kind
from dynmo.schedule.simulator import Span


@dataclass(frozen=True)
class MeshPlan:
    """The plan of a mesh.

    Attributes:
        plan: The plan of one replica.
        seconds: Seconds of a step, with the reductions.
        exposed: Seconds of the reductions that come after all ops.
    """

    mesh: Mesh
    plan: Plan
    seconds: float
    exposed: float

    @property
    def memory(self) -> tuple[int, ...]:
        return self.plan.memory

    @property
    def bubble(self) -> float:
        return self.plan.timeline.bubble_ratio

    @property
    def samples_per_second(self) -> float:
        return self.mesh.global_batch / self.seconds if self.seconds else math.inf


def mesh_profile(
    profile: Profile, mesh: Mesh, zero: int, accumulation_groups: int | None = None
) -> Profile:
    """The costs of one replica, for the mesh's microbatches."""
    assert profile.microbatch is not None
    layers = scale_layers(profile.layers, mesh.micro_batch / profile.microbatch)
    if zero:
        layers = tuple(layer.shared(mesh.replicas) for layer in layers)
    if accumulation_groups is not None:
        layers = tuple(
            layer.with_accumulation(accumulation_groups // mesh.replicas) for layer in layers
        )
    return replace(
        profile, layers=layers, microbatch=mesh.micro_batch, microbatches=mesh.microbatches
    )


_PER_MICROBATCH = (
    "activation_bytes",
    "stash_bytes",
    "output_bytes",
    "workspace_bytes",
    "forward_workspace_bytes",
    "weight_workspace_bytes",
)


def scale_layers(layers: Iterable[LayerCost], share: float) -> tuple[LayerCost, ...]:
    """The costs of a microbatch of `share` times the size.

    Seconds, activations and messages are in proportion. Real kernels do less well on small
    microbatches, so a measurement at that size is better.
    """
    return tuple(
        replace(
            x,
            **{key: getattr(x, key) * share for key in TIMES},
            **{key: math.ceil(getattr(x, key) * share) for key in _PER_MICROBATCH},
        )
        for x in layers
    )


def add_reductions(mesh: Mesh, plan: Plan, bandwidth: float, zero: int = 0) -> MeshPlan:
    """Adds the rest of the reductions to the plan's ops."""
    link = LinkCost(0.0, bandwidth)
    ends: list[float] = []
    gathers: list[float] = []
    for row in plan.timeline.ranks:
        trained = sorted(_ready(plan, row), key=lambda pair: pair[0])
        over = -math.inf
        for ready, layer in trained:
            over = max(over, ready) + (1 if zero else 2) * link.ring_seconds(
                layer.gradient_bytes, mesh.replicas
            )
        ends.append(max(over, row[-1].end))
        weights = sum(layer.weight_bytes for _, layer in trained)
        gathers.append(link.ring_seconds(weights, mesh.replicas) if zero else 0.0)
    begins = [row[0].start for row in plan.timeline.ranks]
    if plan.request.objective is Objective.MAKESPAN:  # the optimizer is a barrier
        seconds = max(ends) + max(gathers) - min(begins)
    else:
        seconds = max(
            end + gather - begin for end, gather, begin in zip(ends, gathers, begins, strict=True)
        )
    if not math.isfinite(seconds):
        raise PartitionError(
            f"at {bandwidth} bytes per second a step takes longer than a number can say; "
            "give a bandwidth that there is"
        )
    return MeshPlan(mesh, plan, seconds, max(0.0, seconds - plan.step))


def _ready(plan: Plan, row: Sequence[Span]) -> Iterator[tuple[float, LayerCost]]:
    """The layers of a rank that train, each with the time at which its last W ends."""
    for op, start, _ in row:
        if op.kind in (Kind.W, Kind.BW) and op.microbatch == plan.request.microbatches - 1:
            for index in reversed(plan.partition.range_of(op.stage)):
                layer = plan.request.layers[index]
                start += layer.w + (layer.b if op.kind is Kind.BW else 0.0)
                if layer.w:
                    yield start, layer
