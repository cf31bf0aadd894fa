"""Decides whether the present ranks become another mesh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dynmo.balance.partition import Partition
from dynmo.balance.trigger import Decision, confirmed
from dynmo.errors import NoRoomError
from dynmo.planner.mesh_plan import Mesh
from dynmo.planner.mesh_search import MeshRequest
from dynmo.planner.reshape import Reshape, reshape
from dynmo.planner.situation import Layers, Situation

# Bytes per second between ranks, if there is one rank and nothing to measure.
_UNKNOWN_LINK = 1e9


@dataclass(frozen=True)
class MeshChoice:
    """The mesh and the placement with which the same ranks go on.

    Attributes:
        mesh: The mesh. None if it stays.
        partition: Number of layers on each of its stages.
        decision: Whether it changes, and why.
    """

    mesh: Mesh | None
    partition: Partition
    decision: Decision

    @property
    def answer(self) -> dict[str, Any]:
        """The choice as JSON."""
        if self.mesh is None:
            return {"move": False, "uncertain": self.decision.uncertain}
        return {
            "move": True,
            "to": [self.mesh.pipeline, self.mesh.replicas],
            "partition": list(self.partition.counts),
        }


def decide_mesh(now: Situation) -> MeshChoice:
    """Decides whether another mesh of the same ranks repays its reshape."""
    request = mesh_request(now, tuple(replicas for _, replicas in now.shapes))

    def best(layers: Layers) -> Reshape:
        return reshape(
            replace(request, profile=now.profile(layers)),
            now.mesh,
            now.partition,
            horizon_steps=now.end - now.step,
            seconds_per_byte=1 / request.bandwidth,
            margin=now.balance.margin,
            hysteresis=now.balance.hysteresis,
        )

    try:
        answer = best(now.layers)
        decision, target = answer.decision, answer.plan.mesh
        if decision.move and target != now.mesh:
            parts = [best(layers).decision for layers in now.halves]
            decision = confirmed(decision, parts, now.preempted)
    except NoRoomError as error:  # the mesh stays, because it trains
        return MeshChoice(None, now.partition, Decision(False, 0.0, f"stay: {error}"))
    if decision.move and target != now.mesh:
        return MeshChoice(target, answer.plan.plan.partition, decision)
    return MeshChoice(None, now.partition, decision)


def mesh_request(now: Situation, replicas: tuple[int, ...]) -> MeshRequest:
    """Returns the request for a search for another mesh.

    Links between replicas count like links between stages: as the slowest measured link.
    """
    profile = now.profile(now.layers)
    rates = [link.bytes_per_second for _, link in profile.links]
    return MeshRequest(
        profile,
        gpus=now.mesh.gpus,
        global_batch=now.mesh.global_batch,
        micro_batches=(now.mesh.micro_batch,),
        schedules=(now.mesh.schedule,),
        chunks=now.chunks,
        memory_limit=now.memory_limit,
        zero=now.zero,
        bandwidth=min(rates, default=_UNKNOWN_LINK),
        objective=now.objective,
        replicas=replicas,
        accumulation_groups=now.accumulation_groups,
    )
