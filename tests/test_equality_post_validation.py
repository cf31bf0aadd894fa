"""Same numbers with post-validation: one digest with and without it.

The runs have rollbacks, moves, freezing and replicas.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.combinations import mostly_matrix
from tests.equality import (
    BALANCERS,
    RANDOM_MOVES,
    config,
    fields_of,
    pruned,
    resumed,
    run,
    same,
    same_events,
    with_sections,
)
from tests.pool import Pool

# Of the gradient's norm, so that some steps are clipped and most are not.
LIMITS = {"adamw": 1.55, "sgd": 1.1}


def late(ranks: int, schedule: str, afterwards: bool = True, **sections: Any) -> dict[str, Any]:
    """Twelve steps of which some are clipped.

    Prunes, freezes and moves come between some of them. The others follow each other closely.
    """
    wanted = pruned(ranks, schedule, {"balancer": RANDOM_MOVES, "every": 4})
    train: dict[str, Any] = wanted["train"]
    train |= {"steps": 12, "max_grad_norm": LIMITS["adamw"], "eval_every": 5}
    wanted["dynamism"] = {
        **wanted["dynamism"],
        "freezing": {"schedule": [[7, 2]]},
        "pruning": {"initial_sparsity": 0.5, "start": 1, "end": 9, "every": 5},
    }
    wanted["pipeline"]["post_validation"] = afterwards
    return with_sections(wanted, sections)


def _by(optimizer: str) -> dict[str, Any]:
    return {"optimizer": optimizer, "max_grad_norm": LIMITS[optimizer]}


@cache
def _late_reference(pool: Pool, optimizer: str, tied: bool = False) -> list[dict[str, Any]]:
    sections = {"train": _by(optimizer), "balance": {"balancer": "none"}, "model": {"tied": tied}}
    return run(pool, late(1, "1f1b", False, **sections), "events")[0]


@pytest.mark.parametrize(
    ("schedule", "ranks", "optimizer"),
    mostly_matrix(
        [("zb-h2", 3, "adamw"), ("zb-v", 2, "adamw"), ("zb-auto", 4, "sgd"), ("1f1b", 1, "sgd")],
        everyday=[("zb-v", 2, "adamw")],
    ),
)
def test_post_validation_leaves_events_and_digest_unchanged(
    pool: Pool, schedule: str, ranks: int, optimizer: str
) -> None:
    """The result of a step is reported one step later.

    Evaluations, cases and checkpoints see the same weights as with a barrier.
    """
    expected = _late_reference(pool, optimizer)
    events = run(pool, late(ranks, schedule, train=_by(optimizer)), "events")[0]
    same_events(
        events,
        expected,
        step=("step", "loss", "gradient_norm", "learning_rate", "frozen"),
        change=("step", "case", "layers", "what"),
        eval=("step", "loss"),
        end=("step", "loss", "weights_digest", "reason"),
    )
    norms = fields_of(expected, "step", "step", "gradient_norm")
    clipped = [step for step, norm in norms if norm > LIMITS[optimizer]]
    assert 0 < len(clipped) <= 5, "some are, but not so many that a barrier is put back"
    assert fields_of(events, "rollback", "step", "what") == [(step, "clipped") for step in clipped]
    assert all(seconds > 0 for (seconds,) in fields_of(events, "rollback", "seconds"))
    if ranks > 1:
        moves = fields_of(events, "rebalance", "step")
        placements = dict(fields_of(events, "step", "step", "layers"))
        assert moves == [(4,), (8,)]
        # The placement that a step had, not the next one's.
        assert placements[3] != placements[4] == placements[5]


@pytest.mark.parametrize(
    ("schedule", "rolls_back"),
    mostly_matrix([("zb-h1", False), ("zb-v", True)], [("zb-h1", False)]),
)
def test_a_weight_tied_over_two_ranks_keeps_the_barrier(
    pool: Pool, schedule: str, rolls_back: bool
) -> None:
    """Neither rank could step without the other.

    In a V, both stages are on one rank, and there is no barrier.
    """
    events = run(pool, late(2, schedule, model={"tied": True}), "events")[0]
    same_events(events, _late_reference(pool, "adamw", tied=True), end=("weights_digest",))
    assert bool(fields_of(events, "rollback", "step")) == rolls_back


@pytest.mark.parametrize("stop", mostly_matrix([3, 6], everyday=[6]))
def test_post_validated_run_resumes_with_and_without_barrier(
    pool: Pool, tmp_path: Path, stop: int
) -> None:
    """Checkpoints contain final steps only.

    The run stops one step later than with a barrier.
    """
    expected = fields_of(_late_reference(pool, "adamw"), "end", "loss", "weights_digest")
    parts = late(3, "zb-h2"), late(2, "zb-v", stop == 3)
    ended = resumed(pool, tmp_path, *parts, stop_after=stop - 1)[0]
    assert [(ended["loss"], ended["weights_digest"])] == expected


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"policy": "autofreeze", "every": 2}, marks=pytest.mark.matrix),
        {"policy": "egeria", "every": 2, "window": 2, "tolerance": 0.9},
    ],
)
def test_measured_freezing_is_the_same_with_post_validation(
    pool: Pool, options: dict[str, Any]
) -> None:
    """The measurements of a step are complete before the case acts on them."""
    runs: list[list[dict[str, Any]]] = []
    for ranks, afterwards in ((1, False), (3, True)):
        wanted = config(ranks, "zb-h1", BALANCERS["none"], False, False, seed=8)
        wanted["train"]["steps"] = 14
        wanted["pipeline"]["post_validation"] = afterwards
        wanted["dynamism"] = {"cases": ["freezing"], "freezing": options}
        runs.append(run(pool, wanted))
    alone, spread = runs
    assert alone[0]["frozen"][-1] > 0, "nothing froze"
    assert spread[0]["frozen"] == alone[0]["frozen"]
    same(spread, alone[0])


def test_barrier_returns_if_every_step_is_clipped(pool: Pool) -> None:
    """The run switches to a barrier after six rollbacks and logs the switch.

    A seventh step has already begun then and is rolled back too.
    """
    wanted = config(2, "zb-h1", BALANCERS["none"], False, True)
    wanted["train"]["steps"] = 8
    wanted["pipeline"]["post_validation"] = True
    events = run(pool, wanted, "events")[0]
    assert fields_of(events, "rollback", "step") == [(step,) for step in range(7)]
    assert fields_of(events, "post_validation", "step", "on", "reason") == [
        (5, False, "6 of the last 6 steps were taken back")
    ]
    wanted["pipeline"]["post_validation"] = False
    alone = run(pool, wanted | {"parallel": {"pipeline": 1}}, "events")[0]
    same_events(events, alone, end=("weights_digest",))
