"""Asks again for a decision that a run has recorded."""

from __future__ import annotations

from typing import Any

from dynmo.balance.partition import Partition
from dynmo.errors import NoRoomError, PartitionError
from dynmo.planner.decide_mesh import decide_mesh
from dynmo.planner.decide_move import (
    decide_move,
    decide_schedule,
    move_answer,
    schedule_answer,
)
from dynmo.planner.decide_ranks import decide_ranks
from dynmo.planner.situation import DecisionRecord

Answer = dict[str, Any]


def ask_again(record: DecisionRecord) -> tuple[Answer, str]:
    """Decides again from what a run had known.

    Returns:
        The answer, and its reason in one line.
    """
    now = record.situation
    if record.kind == "mesh":
        mesh = decide_mesh(now)
        return mesh.answer, mesh.decision.reason
    if record.kind == "ranks":
        try:
            wish = decide_ranks(now)
        except NoRoomError as error:
            return {"move": False}, str(error)
        return wish.answer, wish.choice.decision.reason
    if record.kind == "schedule":
        partition = Partition(tuple(record.answer["partition"]))
        gain = decide_schedule(now, partition)
        reason = "the schedule stays" if gain is None else f"another schedule saves {gain:.2%}"
        return schedule_answer(partition, gain), reason
    try:
        choice = decide_move(now)
    except PartitionError as error:
        return {"move": False}, f"layers stay where they are: {error}"
    reason = "the layers are where they belong" if choice is None else choice.decision.reason
    return move_answer(choice), reason
