"""Answers of decisions as JSON, and the way to ask for them again."""

from __future__ import annotations

from typing import Any

from dynmo.balance.partition import Partition
from dynmo.errors import NoRoomError, PartitionError
from dynmo.planner.decide_mesh import MeshChoice, decide_mesh
from dynmo.planner.decide_move import MoveChoice, decide_move, decide_schedule
from dynmo.planner.decide_ranks import RankWish, decide_ranks
from dynmo.planner.situation import DecisionRecord

Answer = dict[str, Any]


def answer_move(choice: MoveChoice | None) -> Answer:
    if choice is None:
        return {"move": False}
    decision = choice.decision
    return {
        "move": decision.move,
        "to": list(choice.target.counts),
        "uncertain": decision.uncertain,
    }


def answer_schedule(partition: Partition, gain: float | None) -> Answer:
    return {"partition": list(partition.counts), "change": gain is not None}


def answer_mesh(choice: MeshChoice) -> Answer:
    if choice.mesh is None:
        return {"move": False, "uncertain": choice.decision.uncertain}
    mesh = choice.mesh
    return {
        "move": True,
        "to": [mesh.pipeline, mesh.replicas],
        "partition": list(choice.partition.counts),
    }


def answer_ranks(wish: RankWish) -> Answer:
    mesh, decision = wish.choice.mesh, wish.choice.decision
    return {
        "move": decision.move,
        "ranks": wish.ranks,
        "to": [mesh.pipeline, mesh.replicas, mesh.microbatches],
        "partition": list(wish.choice.partition.counts),
        "uncertain": decision.uncertain,
    }


def ask_again(record: DecisionRecord) -> tuple[Answer, str]:
    """Decides again from what a run had known.

    Returns:
        The answer, and its reason in one line.
    """
    now = record.situation
    if record.kind == "mesh":
        mesh = decide_mesh(now)
        return answer_mesh(mesh), mesh.decision.reason
    if record.kind == "ranks":
        try:
            wish = decide_ranks(now)
        except NoRoomError as error:
            return {"move": False}, str(error)
        return answer_ranks(wish), wish.choice.decision.reason
    if record.kind == "schedule":
        partition = Partition(tuple(record.answer["partition"]))
        gain = decide_schedule(now, partition)
        reason = "the schedule stays" if gain is None else f"another schedule saves {gain:.2%}"
        return answer_schedule(partition, gain), reason
    try:
        choice = decide_move(now)
    except PartitionError as error:
        return {"move": False}, f"layers stay where they are: {error}"
    reason = "the layers are where they belong" if choice is None else choice.decision.reason
    return answer_move(choice), reason
