"""Rebalancing: measure, decide and move, on emulated layers with known times."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count, cycle
from statistics import median
from typing import Any

import pytest

from dynmo.balance.partition import Partition
from dynmo.config import parse
from dynmo.cost.layer_cost import Forecast, LayerCost, LinkCost
from dynmo.dynamism.case import Change, Dynamism, Layers
from dynmo.errors import RunError
from dynmo.events import Event, RebalanceResultEvent, to_json
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.comm.world import World
from dynmo.runtime.layer.split_backward import Layer
from dynmo.schedule.op import Kind, Schedule
from dynmo.train.setup import model_of, plan_run
from dynmo.train.trainer import Trainer
from tests.equality import RANDOM_MOVES
from tests.pool import JobFailed, Pool

# Eight layers take 4 ms forward and 4 ms backward. The first four freeze at step 1, which leaves
# rank 0 half of its work.
CONFIG: dict[str, Any] = {
    "model": {"kind": "emulated", "layers": 8, "f": 0.004, "b": 0.002, "w": 0.002, "bytes": 4096},
    "train": {"steps": 17, "global_batch": 4, "micro_batch": 1},
    "parallel": {"pipeline": 2, "timeout": 20.0},
    "pipeline": {"schedule": "zb-h1"},
    "balance": {"balancer": "exact", "every": 8},
    "dynamism": {"cases": ["freezing"], "freezing": {"schedule": [[1, 4]]}},
    "trace": {"steps": 0},
}


def run(pool: Pool, **changes: dict[str, Any]) -> list[dict[str, Any]]:
    config = CONFIG | {section: CONFIG.get(section, {}) | keys for section, keys in changes.items()}
    events = pool.run("events", 2, config=config)
    assert events[1] == [], "only rank 0 tells"
    return events[0]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [e for e in events if e["event"] == kind]


def test_gain_of_a_move_is_predicted_and_measured(pool: Pool) -> None:
    """The move saves about a fifth of a step.

    Loads of 4 x 4 and 4 x 8 ms become 4 x 4 + 8 and 3 x 8 ms. The measured gain compares step
    times.
    """
    events = run(pool, train={"steps": 24})
    (move,) = of(events, "rebalance")
    at = move["step"]
    assert at in (8, 16), "a loaded machine may hide the gain once"
    assert (move["id"], move["from"], move["to"]) == (1, [4, 4], [5, 3])
    assert move["reason"].startswith("move: a step takes")
    assert 0.1 < move["predicted_gain"] < 0.3
    (result,) = of(events, "rebalance_result")
    assert result["id"] == 1
    assert result["step"] == at + 5, (
        "six steps after, of which the first opens channels and is not counted"
    )
    steps = of(events, "step")
    seconds = [s["seconds"] for s in steps]
    assert result["measured_gain"] == pytest.approx(
        1 - median(seconds[at + 1 : at + 6]) / median(seconds[at - 5 : at])
    )
    assert [s["layers"] for s in steps] == [[4, 4]] * at + [[5, 3]] * (24 - at)
    assert move["moved_bytes"] == 4 + 3 * 4, "a weight, two moments, a counter"
    # One move: the run's account is this event's, and what profiling took at each step.
    (end,) = of(events, "end")
    assert 0 < move["measure_seconds"] < end["measure_seconds"]
    assert 0 < move["decide_seconds"] < move["seconds"]
    assert move["decide_seconds"] <= end["decide_seconds"]
    assert end["move_seconds"] == pytest.approx(move["seconds"] - move["decide_seconds"])
    assert end["measure_seconds"] + end["decide_seconds"] + end["move_seconds"] < end["seconds"]


def test_gain_of_a_move_ends_when_the_work_changes(pool: Pool) -> None:
    """The move is at step 8, and more layers freeze four steps later.

    The steps then become faster, but not because of the move.
    """
    longer = {"f": 0.008, "b": 0.004, "w": 0.004}  # busy cores disturb shorter ones
    freezing = {"schedule": [[1, 4], [12, 6]]}
    events = run(pool, model=longer, dynamism={"freezing": freezing}, train={"steps": 16})
    (move,) = of(events, "rebalance")
    (result,) = of(events, "rebalance_result")
    seconds = [s["seconds"] for s in of(events, "step")]
    assert (move["step"], result["step"]) == (8, 12)
    assert result["measured_gain"] == pytest.approx(
        1 - median(seconds[9:12]) / median(seconds[3:8])
    )


def test_hysteresis_prevents_a_move(pool: Pool) -> None:
    events = run(pool, balance={"hysteresis": 0.5}, train={"steps": 9})
    assert of(events, "rebalance") == []
    (end,) = of(events, "end")
    assert end["decide_seconds"] > 0, "to stay is a decision too"
    assert end["move_seconds"] == 0


def test_move_must_repay_its_price(pool: Pool) -> None:
    """The move saves time, but must save 1e9 times its price."""
    events = run(pool, balance={"margin": 1e9}, train={"steps": 9})
    assert of(events, "rebalance") == []


def test_forced_balancers_move_without_a_predicted_gain(pool: Pool) -> None:
    """The balancers `uniform` and `random` move without a check of the gain.

    A result needs two steps. It comes at the next move or at the end of the run at the latest.
    """
    events = run(
        pool,
        balance={"balancer": RANDOM_MOVES, "every": 3},
        train={"steps": 9},
        model={"f": 0.0, "b": 0.0, "w": 0.0},
    )
    moves, results = of(events, "rebalance"), of(events, "rebalance_result")
    assert [m["step"] for m in moves] == [3, 6]
    assert all(m["reason"] == f"{RANDOM_MOVES}: forced" for m in moves)
    assert [r["id"] for r in results] == [1, 2], (
        "of three steps two are counted, then the next move comes"
    )


def test_the_memory_limit_is_respected(pool: Pool) -> None:
    """Rank 0's layers are slow, so one of them should go to rank 1.

    In GPipe, rank 1 holds four microbatches of each layer and lacks the memory.
    """
    times = (0.006,) * 4 + (0.002,) * 4  # busy cores disturb shorter ones
    # Weight, gradient, moments and counter come first, then input and output gradient of the
    # microbatches. The last output is one number.
    layer, last = 20 + 4 * 2 * 4096, 20 + 4 * (4096 + 4)
    # Beside them, while a B runs: the gradient that it was given, and the one it makes.
    enough = 4 * layer + last + 2 * 4096
    for room, target, steps in ((enough, [3, 5], 14), ([2 * enough, enough - 1], None, 9)):
        changes = {
            "train": {"steps": steps},
            "balance": {"every": 4},
            "pipeline": {"schedule": "gpipe", "memory_limit": room},
            "dynamism": {"cases": []},
        }
        moves = of(run(pool, model=dict.fromkeys("fbw", times), **changes), "rebalance")
        assert [m["to"] for m in moves] == ([target] if target else [])


def test_memory_limit_below_the_first_placement_is_refused(pool: Pool) -> None:
    with pytest.raises(JobFailed, match=r"pipeline.memory_limit = 1000"):
        run(pool, pipeline={"memory_limit": 1000})


# Two ranks have four layers each. The second rank takes twice as long in F and B, and next to
# nothing in W.
_UNEVEN = {"f": [4e-3] * 4 + [8e-3] * 4, "b": [4e-3] * 4 + [8e-3] * 4, "w": [8e-3] * 4 + [1e-3] * 4}


def test_schedule_is_rebuilt_from_measured_costs(pool: Pool) -> None:
    """zb-auto starts with equal costs."""
    still = {"cases": []}
    balance = {"balancer": "none"}
    events = run(
        pool,
        model=_UNEVEN,
        pipeline={"schedule": "zb-auto"},
        balance=balance,
        dynamism=still,
        train={"steps": 10},
    )
    remade = of(events, "schedule")
    assert remade, "the schedule was never made anew"
    assert remade[0]["name"] == "zb-auto"
    assert remade[0]["step"] == 8
    assert all(0 < event["predicted_gain"] < 1 for event in remade)
    assert of(events, "rebalance") == []
    steps = of(events, "step")
    assert all(s["layers"] == [4, 4] for s in steps)


def switching(world: World, config: dict[str, Any]) -> list[dict[str, Any]]:
    """A run whose layers 1 and 2 recompute once layers have moved."""
    loaded = parse(config)
    told: list[Event] = []
    trainer = Trainer(loaded, world, model_of(loaded), None, listen=told.append)

    def recompute(partition: Partition, schedule: Schedule, replicas: int) -> frozenset[int]:
        return frozenset({1, 2} if partition.counts != (3, 5) else ())

    engine = trainer.pipeline._engine
    engine.layouts = replace(engine.layouts, recompute=recompute)
    trainer.run()
    return [to_json(event) for event in told]


def test_schedule_is_not_rebuilt_from_outdated_costs(pool: Pool) -> None:
    """Layers that recompute after a move have no measured costs yet.

    The schedule must wait for new measurements.
    """
    changes = {"model": _UNEVEN, "train": {"steps": 16}, "balance": {"initial": [3, 5]}}
    config = CONFIG | {section: CONFIG[section] | keys for section, keys in changes.items()}
    config |= {"pipeline": {"schedule": "zb-auto"}, "dynamism": {}}
    told = pool.run("tests.pipeline.test_rebalance:switching", 2, config=config)[0]
    assert [(e["step"], e["from"]) for e in of(told, "rebalance")] == [(8, [3, 5])]
    assert of(told, "schedule") == []


def misled(world: World, config: dict[str, Any]) -> list[dict[str, Any]]:
    """A run of even layers.

    Every other decision takes the first rank's for slower than they are, the rest the second's.
    Every step counts as equally long.
    """
    loaded = parse(config)
    told: list[Event] = []
    trainer = Trainer(loaded, world, model_of(loaded), None, listen=told.append)
    rebalancer, slow = trainer.pipeline._loop.rebalancer, cycle([range(4), range(4, 8)])
    engine = trainer.pipeline._engine
    known, observe = engine.costs, rebalancer.observe

    def costs() -> tuple[LayerCost, ...]:
        layers = next(slow)
        even = [replace(cost, f=0.001, b=0.001, w=0.001) for cost in known()]
        return tuple(
            replace(cost, f=2.5 * cost.f) if i in layers else cost for i, cost in enumerate(even)
        )

    engine.schedule_keeper.links = {(0, 1): LinkCost(1e-4, 1e9)}
    engine.costs = costs
    rebalancer.observe = lambda step, seconds, busy: observe(step, 0.1, busy)
    trainer.run()
    return [to_json(event) for event in told]


def test_wrong_predictions_reduce_the_number_of_moves(pool: Pool) -> None:
    changes = {
        "model": dict.fromkeys("fbw", 0.001),
        "train": {"steps": 44},
        "balance": {"every": 4},
    }
    config = (
        CONFIG
        | {section: CONFIG[section] | keys for section, keys in changes.items()}
        | {"dynamism": {}}
    )
    told = pool.run("tests.pipeline.test_rebalance:misled", 2, config=config)[0]
    moves, results = of(told, "rebalance"), of(told, "rebalance_result")
    assert all(0.05 < e["predicted_gain"] < 0.3 for e in moves)
    assert {e["measured_gain"] for e in results} == {0.0}
    assert 2 <= len(moves) <= 5, "of ten that noise asks for"


class Hopeful(Dynamism):
    """A case whose forecast on rank 1 is too hopeful.

    There it says that the layers which are slow now will be fast at once.
    """

    name = "hopeful"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def act(self, step: int, layers: Layers) -> Change | None:
        return None

    def forecast(self, step: int) -> Sequence[Forecast]:
        return [Forecast(step + 2, tuple(range(6)), f=0.01, b=0.01, w=0.01)] if self._rank else []


def forecasting(world: World, config: dict[str, Any]) -> str:
    """A run in which rank 1's case forecasts something else than rank 0's.

    Returns how it ends.
    """
    loaded = parse(config)
    trainer = Trainer(loaded, world, model_of(loaded), None)
    trainer.pipeline._cases.append(Hopeful(world.rank))
    try:
        trainer.run()
    except RunError as error:
        return str(error)
    return "done"


def test_different_forecasts_of_ranks_fail_at_once(pool: Pool) -> None:
    """One rank decides to move and the other to stay. Neither waits for the other."""
    changes = {"balance": {"initial": [6, 2], "every": 4}, "train": {"steps": 14}}
    config = (
        CONFIG
        | {section: CONFIG[section] | keys for section, keys in changes.items()}
        | {"dynamism": {}}
    )
    start = time.perf_counter()
    ends = pool.run("tests.pipeline.test_rebalance:forecasting", 2, config=config)
    line = (
        "rank 0 and rank 1 disagree on whether to move layers; do all run the same dynmo, config "
        "and data?"
    )
    assert ends == [line, line]
    assert time.perf_counter() - start < 0.75 * CONFIG["parallel"]["timeout"]


class Told(Dynamism):
    """Says before one step that every layer's work has changed."""

    name = "told"

    def __init__(self, step: int) -> None:
        self._step = step

    def act(self, step: int, layers: Layers) -> Change | None:
        return Change(tuple(range(layers.count)), "other work") if step == self._step else None


class Numbers(HostClock):
    """Marks are plain numbers of seconds."""

    @staticmethod
    def seconds(start: float, end: float) -> float:
        return end - start


def read(
    world: World, config: dict[str, Any], first: int, last: int, told: bool
) -> list[dict[str, Any]]:
    """A run with made-up readings.

    A microbatch takes 1 ms in F and B of each layer and 10 ms in W. It takes 30 ms in layer 5's W
    in the steps `first` to `last`. Every step counts as equally long. If `told` is true, a case
    announces the first of those steps.
    """
    loaded = parse(config)
    events: list[Event] = []
    trainer = Trainer(loaded, world, model_of(loaded), None, listen=events.append)
    if told:
        trainer.pipeline._cases.append(Told(first))
    pipeline, rebalancer = trainer.pipeline._engine, trainer.pipeline._loop.rebalancer
    profiler, seen, steps = pipeline.profiler, rebalancer.observe, count()
    profiler._clock, take = Numbers(), profiler.observe

    def weight(step: int, layer: int) -> float:
        return 0.03 if layer == 5 and first <= step <= last else 0.01

    def observe(layers: Iterable[Layer]) -> None:
        layers, step = list(layers), next(steps)
        for layer in layers:
            layer.marks = [
                (Kind.F, 0.0, 0.001, []),
                (Kind.B, 0.0, 0.001, []),
                (Kind.W, 0.0, weight(step, layer.index), []),
            ]
        take(layers)

    def finish(step: int, seconds: float, busy: Sequence[float]) -> RebalanceResultEvent | None:
        stages = [pipeline.store.layout.partition.range_of(stage) for stage in range(2)]
        return seen(
            step, 0.1, [sum(0.002 + weight(step, layer) for layer in stage) for stage in stages]
        )

    profiler.observe, rebalancer.observe = observe, finish
    trainer.run()
    return [to_json(event) for event in events]


@pytest.mark.parametrize(
    ("first", "last", "told", "moves"),
    [
        (6, 6, True, []),  # one step, of one microbatch: one reading
        (6, 99, True, [9]),  # two more readings say the same
        (
            11,
            99,
            False,
            [19],
        ),  # noticed after three steps, and believed when only such steps are in the window
    ],
)
def test_move_needs_more_than_one_reading(
    pool: Pool, first: int, last: int, told: bool, moves: list[int]
) -> None:
    changes = {
        "model": CONFIG["model"] | dict.fromkeys("fbw", 0.0),
        "train": {"steps": first + 14, "global_batch": 1, "micro_batch": 1},
        "balance": {"every": "auto"},
        "dynamism": {},
    }
    events = pool.run(
        "tests.pipeline.test_rebalance:read",
        2,
        config=CONFIG | changes,
        first=first,
        last=last,
        told=told,
    )[0]
    assert [e["step"] for e in of(events, "rebalance")] == moves


# Rank 0's layers take half as long again as the others, until the first four freeze: from then on
# rank 1 is the busier one.
_TURN = dict.fromkeys("fbw", [0.006] * 4 + [0.004] * 4)


def test_move_with_a_short_forecast_gain_waits(pool: Pool) -> None:
    """The freezing schedule is known. A gain of two steps is not worth a move."""
    freezing = {"freezing": {"schedule": [[10, 4]]}}
    soon = run(pool, model=_TURN, dynamism=freezing, train={"steps": 26})
    (move,) = of(soon, "rebalance")
    assert move["to"] == [5, 3]
    assert move["step"] in (16, 24)
    freezing = {"freezing": {"schedule": [[17, 4]]}}
    every = {"every": 4}
    late = run(pool, model=_TURN, dynamism=freezing, train={"steps": 18}, balance=every)
    (move,) = of(late, "rebalance")
    assert move["to"] == [3, 5]
    assert move["step"] in (4, 8, 12)
    assert move["reason"].endswith("until the change expected at step 17, and then back")


def test_auto_interval_checks_after_a_change(pool: Pool) -> None:
    """Even layers stay at the check after five steps.

    The run checks again at steps 8 and 10, after the freeze. If other processes disturb both
    checks, the next checks are at steps 15 and 20. No layer moves after that.
    """
    freezing = {"freezing": {"schedule": [[7, 4]]}}
    balance = {"every": "auto", "hysteresis": 0.05}
    events = run(pool, balance=balance, dynamism=freezing, train={"steps": 22})
    (move,) = of(events, "rebalance")
    assert (move["from"], move["to"]) == ([4, 4], [5, 3])
    assert move["step"] in (8, 10, 15, 20), "the steps at which it looks"


def test_target_without_memory_for_recompute_is_skipped(pool: Pool) -> None:
    """The recomputed layers may not fit in the placement that the balancer chooses.

    Shapes decide which layers recompute. The balancer uses measured sizes.
    """
    (told, _) = pool.run(
        "events", 2, config=CONFIG | {"train": CONFIG["train"] | {"steps": 9}}, fits=False
    )
    assert of(told, "rebalance") == []
    assert [e["layers"] for e in of(told, "step")] == [[4, 4]] * 9


def test_run_continues_if_no_placement_fits(pool: Pool) -> None:
    """The balancer estimates more memory than the ranks use at their peaks.

    It counts gradients at all times, and the largest workspace on every rank.
    """
    wanted: dict[str, Any] = {
        "model": {"blocks": 2, "hidden": 32, "heads": 2, "sequence": 16},
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 1},
        "parallel": {"pipeline": 2, "timeout": 20.0},
        "pipeline": {"schedule": "gpipe"},
        "balance": {"balancer": "exact", "every": 2},
        "trace": {"steps": 0},
    }
    wanted["pipeline"]["memory_limit"] = max(plan_run(parse(wanted)).memory)
    events = pool.run("events", 2, config=wanted)[0]
    (told,) = of(events, "change")
    assert (told["step"], told["case"], told["layers"]) == (2, "balance", [])
    assert "bytes" in told["what"]
    assert of(events, "rebalance") == []
    assert of(events, "end")[0]["reason"] == "done"
    # The same holds for another mesh, if one is asked for.
    wanted["train"] = wanted["train"] | {"reduction_slots": 2}
    wanted["pipeline"]["memory_limit"] = max(plan_run(parse(wanted)).memory)
    events = pool.run("events", 2, config=wanted | {"elastic": {"reshape": True}})[0]
    assert of(events, "reshape") == []
    assert of(events, "end")[0]["reason"] == "done"


def test_run_continues_if_a_baseline_has_no_placement(pool: Pool) -> None:
    wanted: dict[str, Any] = {
        "model": {"blocks": 3, "hidden": 16, "heads": 2, "sequence": 8},
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 1},
        "parallel": {"pipeline": 2, "timeout": 20.0},
        "balance": {
            "balancer": "python:benchmarks.baselines.placements:megatron_uniform",
            "every": 2,
        },
        "trace": {"steps": 0},
    }
    events = pool.run("events", 2, config=wanted)[0]
    (told,) = of(events, "change")
    assert "multiple of 2 blocks" in told["what"]
    assert of(events, "end")[0]["reason"] == "done"


def test_auto_interval_fixes_a_bad_initial_placement(pool: Pool) -> None:
    events = run(
        pool,
        balance={"every": "auto", "initial": [6, 2]},
        dynamism={"cases": []},
        train={"steps": 17},
    )
    (move,) = of(events, "rebalance")
    assert (move["from"], move["to"]) == ([6, 2], [4, 4])
    assert move["step"] in (5, 10, 15)
