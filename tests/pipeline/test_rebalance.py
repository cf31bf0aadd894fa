"""Rebalancing: measure, decide and move, on emulated layers with known times."""

from __future__ import annotations

from typing import Any

import pytest

from dynmo.config import parse
from dynmo.train.setup import plan_run
from tests.equality import RANDOM_MOVES
from tests.pool import JobFailed, Pool

# Eight layers take 4 ms forward and 4 ms backward. The first four freeze at step 1, which leaves
# rank 0 half of its work.
CONFIG: dict[str, Any] = {
    "model": {"kind": "emulated", "layers": 8, "f": 0.004, "b": 0.002, "w": 0.002, "bytes": 4096},
    "train": {"steps": 9, "global_batch": 4, "micro_batch": 1},
    "parallel": {"pipeline": 2, "timeout": 20.0},
    "pipeline": {"schedule": "zb-h1"},
    "balance": {"balancer": "exact", "every": 8},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[1, 4]]}},
    "trace": {"steps": 0},
}
STILL = {"cases": []}


def run(
    pool: Pool, job: str = "events", given: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Any:
    """Returns what rank 0 returns of a job of `exact_runs`, with its own options in `given`."""
    config = CONFIG | {name: CONFIG[name] | keys for name, keys in sections.items()}
    job = f"tests.pipeline.exact_runs:{job}"
    first, second = pool.run(job, 2, config=config, **(given or {}))
    assert second in ([], first), "only rank 0 tells events"
    return first


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == kind]


def test_gain_of_a_move_is_predicted_and_measured(pool: Pool) -> None:
    """Loads of 4 x 4 and 4 x 8 ms become 4 x 4 + 8 and 3 x 8 ms."""
    events = run(pool, train={"steps": 15})
    (move,) = of(events, "rebalance")
    assert (move["step"], move["id"], move["from"], move["to"]) == (8, 1, [4, 4], [5, 3])
    assert move["reason"].startswith("move: a step takes")
    assert 0.1 < move["predicted_gain"] < 0.3
    (result,) = of(events, "rebalance_result")
    # Six steps after, of which the first opens channels and is not counted.
    assert (result["id"], result["step"]) == (1, 13)
    assert result["measured_gain"] == pytest.approx(0.25)
    steps = of(events, "step")
    assert [s["seconds"] for s in steps[1:]] == pytest.approx([0.128] * 7 + [0.096] * 7)
    assert [s["layers"] for s in steps] == [[4, 4]] * 8 + [[5, 3]] * 7
    assert move["moved_bytes"] == 4 + 3 * 4, "a weight, two moments, a counter"
    # One move: the run's account is this event's, and what profiling took at each step.
    (end,) = of(events, "end")
    assert 0 < move["measure_seconds"] < end["measure_seconds"]
    assert 0 < move["decide_seconds"] < move["seconds"]
    assert move["decide_seconds"] <= end["decide_seconds"]
    assert end["move_seconds"] == pytest.approx(move["seconds"] - move["decide_seconds"])
    assert end["measure_seconds"] + end["decide_seconds"] + end["move_seconds"] < end["seconds"]


def test_gain_of_a_move_ends_when_the_work_changes(pool: Pool) -> None:
    """Steps become faster when more layers freeze, but not because of the move."""
    freezing = {"schedule": [[1, 4], [12, 6]]}
    events = run(pool, dynamism={"freezing": freezing}, train={"steps": 14})
    (move,), (result,) = of(events, "rebalance"), of(events, "rebalance_result")
    assert (move["step"], result["step"]) == (8, 12)
    assert result["measured_gain"] == pytest.approx(0.25)
    assert of(events, "step")[13]["seconds"] < 0.09


@pytest.mark.parametrize("balance", [{"hysteresis": 0.5}, {"margin": 1e9}])
def test_move_must_gain_enough_and_repay_its_price(pool: Pool, balance: dict[str, float]) -> None:
    events = run(pool, balance=balance)
    assert of(events, "rebalance") == []
    (end,) = of(events, "end")
    assert end["decide_seconds"] > 0, "to stay is a decision too"
    assert end["move_seconds"] == 0


def test_forced_balancers_move_without_a_predicted_gain(pool: Pool) -> None:
    """A result needs two steps. It comes at the next move, or at the end of the run."""
    events = run(pool, balance={"balancer": RANDOM_MOVES, "every": 3})
    moves, results = of(events, "rebalance"), of(events, "rebalance_result")
    assert [m["step"] for m in moves] == [3, 6]
    assert all(m["reason"] == f"{RANDOM_MOVES}: forced" for m in moves)
    # Of three steps two are counted, then the next move comes.
    assert [r["id"] for r in results] == [1, 2]


def test_the_memory_limit_is_respected(pool: Pool) -> None:
    """One slow layer of rank 0 should go to rank 1, where GPipe holds four microbatches of it."""
    times = dict.fromkeys("fbw", (0.006,) * 4 + (0.002,) * 4)
    # Weight, gradient, moments and counter come first, then input and output gradient of the
    # microbatches. The last output is one number.
    layer, last = 20 + 4 * 2 * 4096, 20 + 4 * (4096 + 4)
    # Beside them, while a B runs: the gradient that it makes. Gradients of weights come later.
    enough = 4 * layer + last + 4096 - 8
    for room, targets in ((enough, [[3, 5]]), ([2 * enough, enough - 1], [])):
        pipeline = {"schedule": "gpipe", "memory_limit": room}
        events = run(pool, model=times, balance={"every": 4}, pipeline=pipeline, dynamism=STILL)
        assert [move["to"] for move in of(events, "rebalance")] == targets


def test_memory_limit_below_the_first_placement_is_refused(pool: Pool) -> None:
    with pytest.raises(JobFailed, match=r"pipeline.memory_limit = 1000"):
        run(pool, pipeline={"memory_limit": 1000})


# Two ranks have four layers each. The second rank takes twice as long in F and B, and next to
# nothing in W.
_UNEVEN = {"f": [4e-3] * 4 + [8e-3] * 4, "b": [4e-3] * 4 + [8e-3] * 4, "w": [8e-3] * 4 + [1e-3] * 4}


def test_schedule_is_rebuilt_from_measured_costs(pool: Pool) -> None:
    """zb-auto starts with equal costs."""
    auto, none = {"schedule": "zb-auto"}, {"balancer": "none"}
    events = run(pool, model=_UNEVEN, pipeline=auto, balance=none, dynamism=STILL)
    (remade,) = of(events, "schedule")
    assert (remade["name"], remade["step"]) == ("zb-auto", 8)
    assert 0 < remade["predicted_gain"] < 1
    assert of(events, "rebalance") == []
    assert all(s["layers"] == [4, 4] for s in of(events, "step"))


def test_schedule_is_not_rebuilt_from_outdated_costs(pool: Pool) -> None:
    """Layers that recompute after a move have no measured costs yet."""
    auto, initial = {"schedule": "zb-auto"}, {"initial": [3, 5]}
    told = run(pool, "switching", model=_UNEVEN, pipeline=auto, balance=initial, dynamism=STILL)
    assert [(e["step"], e["from"]) for e in of(told, "rebalance")] == [(8, [3, 5])]
    assert of(told, "schedule") == []


def test_wrong_predictions_reduce_the_number_of_moves(pool: Pool) -> None:
    every, steps = {"every": 4}, {"steps": 44}
    told = run(pool, "misled", balance=every, train=steps, dynamism=STILL)
    moves, results = of(told, "rebalance"), of(told, "rebalance_result")
    assert all(0.05 < e["predicted_gain"] < 0.3 for e in moves)
    assert {e["measured_gain"] for e in results} == {0.0}
    assert 2 <= len(moves) <= 5, "of ten that noise asks for"


def test_different_forecasts_of_ranks_fail_at_once(pool: Pool) -> None:
    """One rank decides to move and the other to stay. Neither waits for the other."""
    balance, steps = {"initial": [6, 2], "every": 4}, {"steps": 14}
    end = run(pool, "forecasting", balance=balance, train=steps, dynamism=STILL)
    assert end == (
        "rank 0 and rank 1 disagree on whether to move layers; do all run the same dynmo, config "
        "and data?"
    )


@pytest.mark.parametrize(
    ("first", "last", "told", "moves"),
    [
        (6, 6, True, []),  # one step, of one microbatch: one reading
        (6, 99, True, [9]),  # two more readings say the same
        # Noticed after three steps, and believed when only such steps are in the window.
        (11, 99, False, [19]),
    ],
)
def test_move_needs_more_than_one_reading(
    pool: Pool, first: int, last: int, told: bool, moves: list[int]
) -> None:
    events = run(
        pool,
        "slowed",
        {"first": first, "last": last, "told": told},
        model={"f": 0.001, "b": 0.001, "w": 0.01},
        train={"steps": first + 14, "global_batch": 1},
        balance={"every": "auto"},
        dynamism=STILL,
    )
    assert [e["step"] for e in of(events, "rebalance")] == moves


@pytest.mark.parametrize(
    ("freezes", "every", "steps", "moved"),
    [
        (10, 8, 20, (16, [5, 3])),  # it waits at step 8
        (17, 4, 18, (4, [3, 5])),
    ],
)
def test_move_with_a_short_forecast_gain_waits(
    pool: Pool, freezes: int, every: int, steps: int, moved: tuple[int, list[int]]
) -> None:
    """Rank 0's layers are the slower ones, until its four freeze as the schedule says."""
    events = run(
        pool,
        model=dict.fromkeys("fbw", [0.006] * 4 + [0.004] * 4),
        dynamism={"freezing": {"schedule": [[freezes, 4]]}},
        balance={"every": every},
        train={"steps": steps},
    )
    (move,) = of(events, "rebalance")
    assert (move["step"], move["to"]) == moved
    assert ("saved over at least 13 steps" in move["reason"]) == (freezes == 17)


@pytest.mark.parametrize(
    ("initial", "dynamism", "moved"),
    [
        # Even layers stay at the check after five steps. The run checks again after the freeze.
        ([4, 4], {"freezing": {"schedule": [[7, 4]]}}, (8, [5, 3])),
        ([6, 2], STILL, (5, [4, 4])),
    ],
)
def test_auto_interval_checks_first_and_after_a_change(
    pool: Pool, initial: list[int], dynamism: dict[str, Any], moved: tuple[int, list[int]]
) -> None:
    balance = {"every": "auto", "initial": initial}
    events = run(pool, balance=balance, dynamism=dynamism, train={"steps": 17})
    assert [(move["step"], move["to"]) for move in of(events, "rebalance")] == [moved]


def test_target_without_memory_for_recompute_is_skipped(pool: Pool) -> None:
    """Shapes decide which layers recompute. The balancer uses measured sizes."""
    told = run(pool, given={"fits": False})
    assert of(told, "rebalance") == []
    assert [e["layers"] for e in of(told, "step")] == [[4, 4]] * 9


def gpt(balancer: str, blocks: int) -> dict[str, Any]:
    return {
        "model": {"blocks": blocks, "hidden": 32, "heads": 2, "sequence": 16},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 1},
        "parallel": {"pipeline": 2, "timeout": 20.0},
        "pipeline": {"schedule": "gpipe"},
        "balance": {"balancer": balancer, "every": 2},
        "trace": {"steps": 0},
    }


def test_run_continues_if_no_placement_fits(pool: Pool) -> None:
    """The balancer counts gradients at all times, and the largest workspace on every rank."""
    wanted = gpt("exact", 2)
    wanted["pipeline"]["memory_limit"] = max(plan_run(parse(wanted)).memory)
    events = pool.run("events", 2, config=wanted)[0]
    (told,) = of(events, "change")
    assert (told["step"], told["case"], told["layers"]) == (2, "balance", [])
    assert "bytes" in told["what"]
    assert of(events, "rebalance") == []
    assert of(events, "end")[0]["reason"] == "done"
    # The same holds for another mesh, if one is asked for.
    wanted["train"]["reduction_slots"] = 2
    wanted["pipeline"]["memory_limit"] = max(plan_run(parse(wanted)).memory)
    events = pool.run("events", 2, config=wanted | {"elastic": {"reshape": True}})[0]
    assert of(events, "reshape") == []
    assert of(events, "end")[0]["reason"] == "done"


def test_run_continues_if_a_baseline_has_no_placement(pool: Pool) -> None:
    balancer = "python:benchmarks.baselines.placements:megatron_uniform"
    events = pool.run("events", 2, config=gpt(balancer, 3))[0]
    (told,) = of(events, "change")
    assert "multiple of 2 blocks" in told["what"]
    assert of(events, "end")[0]["reason"] == "done"
