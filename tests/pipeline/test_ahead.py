"""Layers that move while a step runs: the same bits, whatever becomes of the step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

import dynmo
from dynmo.change_events import ChangeEvent, RebalanceEvent
from dynmo.errors import NoRoomError, RunError
from dynmo.events import Event, StepResult
from dynmo.runtime.state import migration
from tests.combinations import mostly_matrix
from tests.equality import RANDOM_MOVES
from tests.pipeline import test_skipped_steps as skipped
from tests.pool import Pool

STEPS = 9
BAD = {1: "inputs", 3: "gradient"}
FAILS, REFUSES = 5, 7


def moves(world: dynmo.World, **options: Any) -> dict[str, Any]:
    """Trains while layers move during the steps 1, 3, 5 and 7.

    The steps 1 and 3 are not finite. In step 5 a layer fails at first. In step 7 no rank has room.
    """
    events, results = list[Event](), list[StepResult]()
    balance: dict[str, Any] = {
        "balance": dynmo.Balance(balancer=RANDOM_MOVES, every=1, move_ahead=True)
    }
    pipeline = skipped.made(world, listen=events.append, **options, **balance)
    failed = 0

    def no_room(*_: object) -> Any:
        raise NoRoomError("no room")

    room = migration.room_for
    while pipeline.steps < STEPS:
        step = pipeline.steps
        skipped.failing = 2 if step == FAILS and not failed else None
        refuses = step == REFUSES
        data = skipped.own(pipeline, skipped.batch(step, BAD.get(step)))
        try:
            with mock.patch.object(migration, "room_for", no_room if refuses else room):
                results += pipeline.advance(*data)
        except (ValueError, RunError):
            failed += 1
    skipped.failing = None
    without = skipped.made(world, **options)
    good = [step for step in range(STEPS) if step not in BAD]
    losses = [without.step(*skipped.own(without, skipped.batch(step))).loss for step in good]
    digests = [skipped.traces(each)[0] for each in (pipeline, without)]
    return {
        "failed": failed,
        "same": digests[0] == digests[1],
        "losses": [each.loss for each in results if not each.skipped] == losses,
        "layers": [list(each.layers) for each in results],
        "moves": [
            [e.step, list(e.source), list(e.target)]
            for e in events
            if isinstance(e, RebalanceEvent)
        ],
        "refused": [e.what for e in events if isinstance(e, ChangeEvent)],
    }


@pytest.mark.parametrize(
    ("ranks", "options"),
    mostly_matrix(
        [
            (3, {"schedule": "zb-h1"}),
            (2, {"schedule": "1f1b", "optimizer": "sgd"}),
            (2, {"schedule": "zb-v"}),
            (2, {"precision": "bfloat16", "optimizer": "adafactor"}),
            (4, {"replicas": 2, "reduction_slots": 2}),
            (4, {"replicas": 2, "zero": 1, "schedule": "zb-h1"}),
            (2, {"recompute": "all", "schedule": "1f1b"}),
            (2, {"clip_scope": "local", "max_grad_norm": 0.1}),
        ],
        everyday=[(3, {"schedule": "zb-h1"})],
    ),
)
def test_moves_during_steps_change_no_bits(pool: Pool, ranks: int, options: dict[str, Any]) -> None:
    told = pool.run("tests.pipeline.test_ahead:moves", ranks, **options)
    for each in told:
        assert (each["failed"], each["same"], each["losses"]) == (1, True, True)
        assert each["refused"] == told[0]["refused"]
    assert [move[0] for move in told[0]["moves"]] == [2, 4, 6, 8], "the last one between steps"
    assert [move[2] for move in told[0]["moves"]] == told[0]["layers"][2::2]
    assert [move[1] for move in told[0]["moves"]] == told[0]["layers"][1::2]
    (refusal,) = told[0]["refused"]
    assert refusal.endswith("no room; all stay where they were")
