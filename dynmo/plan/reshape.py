"""Changes the mesh of the same GPUs.

The new mesh has more replicas of a shorter pipeline, or fewer replicas of a longer one.
The questions are whether the other mesh is faster, and whether it repays the bytes that move.

    4 ranks                 2 ranks x 2 replicas
    rank 0  a b             rank 0  a b c d
         1  c d                  1  a b c d
         2  e f                  2  e f g h      rank 0 must get c and d, rank 1 a and b, ...
         3  g h                  3  e f g h

Ranks are stage-major: the copies of a stage are neighbours, and a rank finds in its new stage the
layers that it holds already.

Few layers on a rank cannot be balanced, however they are placed: the larger of two halves stays the
larger. Twice as many layers on half as many stages can be balanced, if the memory holds them.
`reduction_slots` keep the bits when the replicas change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import PartitionError
from dynmo.plan.mesh_plan import Mesh, MeshPlan, add_reductions, mesh_profile
from dynmo.plan.mesh_search import MeshRequest, search
from dynmo.plan.partition import Partition
from dynmo.plan.plan_request import PlanRequest, evaluate_partition
from dynmo.plan.trigger import Decision, worth_moving
from dynmo.schedule.catalogue import stage_ranks_of


@dataclass(frozen=True)
class Reshape:
    """The answer of `reshape`.

    Attributes:
        plan: The plan to run from now on. The current mesh if `decision.move` is false.
        moved_bytes: Bytes of the rank that must get most.
    """

    plan: MeshPlan
    decision: Decision
    moved_bytes: int


def reshape(
    request: MeshRequest,
    current: Mesh,
    partition: Partition,
    *,
    horizon_steps: int,
    seconds_per_byte: float = 0.0,
    margin: float = 1.5,
    hysteresis: float = 0.02,
) -> Reshape:
    """Finds the best mesh for these costs, and decides if changing to it pays.

    The current mesh takes part, placed anew. The candidate that saves most after its price is
    chosen. So nothing is chosen that is predicted to be slower than to stay.

    Args:
        request: The costs, and what may be searched (`gpus`, `global_batch`, memory).
        current: The mesh as it is.
        partition: The layers of each of its stages.
        horizon_steps: Number of steps in which the change must pay.
        seconds_per_byte: Seconds per byte of the rank that must get most. All ranks get their
            layers at once.
        margin: Multiplies the price of the move.
        hysteresis: The least relative gain.
    """
    if (current.gpus, current.global_batch) != (request.gpus, request.global_batch):
        raise PartitionError(
            f"a mesh of {current.gpus} GPUs and {current.global_batch} sequences, for a request "
            f"of {request.gpus} and "
            f"{request.global_batch}; reshaping changes neither"
        )
    stay = plan_as_now(request, current, partition)
    candidates = search(request).candidates
    prices = [
        largest_arrival(request.profile.layers, current, partition, x.mesh, x.plan.partition)
        for x in candidates
    ]

    def net(index: int) -> float:
        saved = (stay.seconds - candidates[index].seconds) * horizon_steps
        return saved - prices[index] * seconds_per_byte * margin

    best = max(range(len(candidates)), key=lambda i: (net(i), -prices[i], -i))
    decision = worth_moving(
        stay.seconds,
        candidates[best].seconds,
        horizon_steps,
        prices[best] * seconds_per_byte,
        margin,
        hysteresis,
    )
    if not decision.move:
        return Reshape(stay, decision, 0)
    return Reshape(candidates[best], decision, prices[best])


def plan_as_now(request: MeshRequest, current: Mesh, partition: Partition) -> MeshPlan:
    """Predicts a step on the mesh and the placement that a run has now.

    The memory limit is left out, because the run already trains.
    """
    plan_request = PlanRequest(
        mesh_profile(request.profile, current, request.zero, request.accumulation_groups),
        current.pipeline,
        current.microbatches,
        current.schedule,
        chunks=request.chunks,
        objective=request.objective,
        any_links=True,
        replicas=current.replicas,
    )
    plan = evaluate_partition(plan_request, partition)
    return add_reductions(current, plan, request.bandwidth, request.zero)


def largest_arrival(
    layers: Sequence[LayerCost],
    old: Mesh,
    old_partition: Partition,
    new: Mesh,
    new_partition: Partition,
    origins: Sequence[int | None] | None = None,
) -> int:
    """Counts the bytes of the rank that must get most.

    A rank must get the layers that its new stages hold and its old ones did not. `origins` are the
    old numbers of the new ranks, None for a newcomer. Without them they are the same.
    """
    return max(
        sum(
            layers[i].moved_bytes
            for i in _held(new, new_partition, rank)
            - (set() if origin is None else _held(old, old_partition, origin))
        )
        for rank, origin in enumerate(range(new.gpus) if origins is None else origins)
    )


def _held(mesh: Mesh, partition: Partition, rank: int) -> set[int]:
    """The layers of a rank. Empty if the mesh has no such rank."""
    stage_ranks = stage_ranks_of(mesh.schedule, mesh.pipeline, partition.stages // mesh.pipeline)
    return {
        i
        for stage, holder in enumerate(stage_ranks)
        if holder == rank // mesh.replicas
        for i in partition.range_of(stage)
    }
