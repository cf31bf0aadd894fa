from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dynmo.cost.input_file import Link
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import InputError
from dynmo.plan.evaluate import frozen_stages, pipeline_costs
from dynmo.plan.partition import Partition
from dynmo.plan.pays import Change, Interval, pays
from dynmo.plan.workload import (
    LayerSection,
    Moment,
    Policy,
    StepTime,
    Workload,
    mean_ranks,
    parse,
    ranks_needed,
    read,
    replay,
)
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import SCHEDULES, SHAPES, make
from dynmo.schedule.simulator import simulate
from tests.combinations import mostly_matrix
from tests.equality import RANDOM_MOVES

ONE = LayerCost(1.0, 1.0, 1.0, 10, 100, 100, 200, 5, 2, 10)
FROZEN = replace(ONE, b=0.0, w=0.0)
LINK = Link(latency=0.5, bytes_per_second=1000.0)
Moments = Sequence[tuple[int, Sequence[LayerCost]]]
CHANGING: Moments = ((0, (ONE,) * 12), (10, (FROZEN,) * 6 + (ONE,) * 6))


def workload(moments: Moments = CHANGING, **changes: Any) -> Workload:
    """Twelve layers on three ranks, of which the first six freeze at step 10."""
    given = {"schedule": "1f1b", "link": LINK, "policy": Policy(every=5)}
    given |= {"steps": 40, "ranks": 3, "microbatches": 8} | changes
    return Workload(layers=LayerSection(moments=[Moment.of(*x) for x in moments]), **given)


def total(steps: Sequence[StepTime]) -> float:
    return sum(x.seconds for x in steps)


def seconds(
    moment: int, counts: tuple[int, ...], objective: Objective = Objective.MAKESPAN
) -> float:
    """The seconds of the simulator, without the replay."""
    links = (LINK.to_link_cost(),) * 2
    costs = pipeline_costs(workload().moments[moment][1], Partition(counts), links=links)
    timeline = simulate(make("1f1b", 3, 8, first_trainable=frozen_stages(costs)), costs)
    return timeline.makespan if objective is Objective.MAKESPAN else timeline.span


def test_each_policy_has_the_expected_step_times() -> None:
    outcome = replay(workload())
    before, after = seconds(0, (4, 4, 4)), seconds(1, (4, 4, 4))
    assert [x.seconds for x in outcome.static] == [before] * 10 + [after] * 30
    (move,) = outcome.moves
    moved = seconds(1, move.target)
    # The costs change at step 10, and are known once that step was measured.
    assert (move.step, move.source) == (15, (4, 4, 4))
    assert [x.seconds for x in outcome.policy] == [before] * 10 + [after] * 5 + [moved] * 25
    assert moved < after
    assert outcome.partitions == ((4, 4, 4),) * 15 + (move.target,) * 25
    # 300 bytes a layer (weights and moments) over a link, one after another.
    assert move.moved_bytes == 300 * move.layers
    assert move.seconds == pytest.approx(move.layers * (0.5 + 0.3))
    assert outcome.seconds == pytest.approx(total(outcome.policy) + move.seconds)


def test_rebalance_decision_is_that_of_pays() -> None:
    for margin in (0.0, 1.0, 20.0, 1e6):
        outcome = replay(workload(policy=Policy(every=5, margin=margin)))
        for rebalance in outcome.rebalances:
            found = seconds(1, rebalance.source), seconds(1, rebalance.target)
            change = Change(rebalance.seconds, rebalance.seconds, margin, 0.02)
            left = Interval(rebalance.step, 40, ())
            expected = pays(change, [left], lambda _, found=found: found)
            assert (rebalance.moved, rebalance.reason) == (expected.pays, expected.reason)
        assert bool(outcome.moves) == (margin < 1e6)
    assert not replay(workload(policy=Policy(every=5, hysteresis=0.9))).moves


def test_a_move_late_in_the_run_does_not_pay() -> None:
    early, late = (replay(workload(policy=Policy(every=every, margin=100.0))) for every in (12, 36))
    assert early.moves
    assert not late.moves
    assert late.rebalances[0].reason.startswith("stay: ")


def test_forced_balancer_ignores_the_price() -> None:
    outcome = replay(
        workload(policy=Policy(balancer="uniform", every=5, margin=1e9, initial=(8, 2, 2)))
    )
    (move,) = outcome.moves
    assert (move.step, move.target, move.reason) == (5, (4, 4, 4), "uniform: forced")

    outcome = replay(workload(policy=Policy(balancer="none")))
    assert outcome.policy == outcome.static
    assert outcome.rebalances == ()
    assert len(replay(workload(policy=Policy(balancer=RANDOM_MOVES, every=5))).moves) == 7


def test_perfect_balance_has_even_stages() -> None:
    even = replay(workload(moments=((0, (ONE,) * 12),)))
    assert even.perfect == even.static == even.policy
    outcome = replay(workload())
    assert total(outcome.perfect) < outcome.seconds < total(outcome.static)


def test_move_price_is_proportional_to_bytes() -> None:
    (move,) = replay(workload(policy=Policy(every=5, seconds_per_byte=1e-3))).moves
    assert move.seconds == pytest.approx(1e-3 * move.moved_bytes)


def test_move_must_repay_its_own_price() -> None:
    """The first move sends one byte. The second move would take longer than it saves."""

    def layers(*times: float) -> tuple[LayerCost, ...]:
        sizes = (1, 10**9, 1, 1)
        return tuple(LayerCost(t, t, t, weight_bytes=x) for t, x in zip(times, sizes, strict=True))

    moments = ((0, layers(1, 1, 1, 3)), (20, layers(3, 1, 1, 1)))
    policy = Policy(seconds_per_byte=1e-6)
    outcome = replay(workload(moments, ranks=2, microbatches=4, link=Link(), policy=policy))
    decided = [(x.step, x.moved, x.moved_bytes) for x in outcome.rebalances]
    assert decided == [(10, True, 1), (30, False, 10**9 + 1)]


def test_perfect_balance_is_never_slower_than_a_placement() -> None:
    """With a frozen prefix, whole layers may be faster than perfectly even stages."""
    outcome = replay(workload(((0, (FROZEN,) * 2 + (ONE,) * 10),), microbatches=2))
    for perfect, *others in zip(outcome.perfect, outcome.policy, outcome.static, strict=True):
        assert perfect.seconds <= min(other.seconds for other in others)


def test_reduction_time_of_replicas_is_added() -> None:
    """A ring takes 2 (r - 1) latencies and sends 2 (r - 1) / r of the bytes."""
    ring = {"replicas": 4, "replica_link": Link(latency=0.25, bytes_per_second=100.0)}
    alone, four = (
        replay(workload(moments=((0, (ONE,) * 12),), **given)).policy[0].seconds
        for given in ({}, ring)
    )
    assert four - alone == pytest.approx(6 * 0.25 + 1.5 * 400 / 100)
    # Frozen layers have no gradients: of a rank with nothing else, nothing is reduced.
    half = replay(workload(**ring, policy=Policy(balancer="none")))
    assert half.static[-1].seconds >= seconds(1, (4, 4, 4))


@pytest.mark.parametrize(
    ("objective", "schedule"),
    mostly_matrix(
        product(Objective, [name for name in SCHEDULES if name != "interleaved-1f1b"]),
        everyday=[*product([Objective.MAKESPAN], SHAPES[:2]), (Objective.SPAN, "1f1b")],
    ),
)
def test_every_schedule_replays_a_workload(schedule: str, objective: Objective) -> None:
    outcome = replay(workload(schedule=schedule, objective=objective))
    assert len(outcome.policy) == len(outcome.static) == len(outcome.perfect) == 40
    assert all(0 <= x.idle_ratio < 1 for x in (*outcome.policy, *outcome.static, *outcome.perfect))
    assert outcome.seconds <= total(outcome.static) * (1 + 1e-12), "summed in another order"


def test_automatic_schedule_uses_the_latest_measured_costs() -> None:
    """zb-auto keeps the order of the old costs until the next decision."""
    slow = tuple(replace(ONE, f=1 + i / 3) for i in range(12))
    given = {"schedule": "zb-auto", "policy": Policy(balancer="none")}
    outcome = replay(workload(moments=((0, (ONE,) * 12), (10, slow)), **given))
    fresh = replay(workload(moments=((0, slow),), **given))
    assert outcome.policy[10].seconds >= fresh.policy[0].seconds


def test_placement_over_the_memory_limit_is_refused() -> None:
    with pytest.raises(InputError, match=r"rank 0 needs .* over the limit of 1000"):
        replay(workload(memory_limit=1000))


def test_fluctuations_move_no_layer() -> None:
    """A different layer is slow at each step. An announced change counts at once."""
    moments = tuple(
        (step, tuple(replace(ONE, f=8.0) if i == 5 * step % 12 else ONE for i in range(12)))
        for step in range(40)
    )
    given = {"moments": moments, "policy": Policy(every=1, margin=0.0)}
    assert len(replay(workload(**given)).moves) > 10
    assert not replay(workload(**given, announced=False)).moves


def test_lasting_change_is_detected_by_the_readings() -> None:
    """All readings are of the new costs after five steps."""
    outcome = replay(workload(policy=Policy(every=1), announced=False))
    (move,) = outcome.moves
    assert move.step == 15
    assert replay(workload(policy=Policy(every=1))).moves[0].step == 11


# -- the file: valid contents, and errors that name the key ----------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples/workload.toml"
MOMENT = {"step": 0, "f": [1.0, 1.0], "b": [1.0, 1.0], "w": [1.0, 1.0]}
LEAST: dict[str, Any] = {"steps": 4, "ranks": 2, "microbatches": 2, "layers": {"moments": [MOMENT]}}


def test_minimal_workload_file() -> None:
    workload = parse(LEAST, Path())
    assert workload.moments == ((0, (LayerCost(1, 1, 1),) * 2),)
    assert (workload.schedule, workload.objective) == ("zb-h1", Objective.MAKESPAN)
    assert (workload.policy, workload.replicas) == (Policy(), 1)
    assert workload.link.to_link_cost() == LinkCost(0.0, math.inf)
    assert replay(workload).moves == ()


def test_general_workspace_is_the_default_of_each_op() -> None:
    given = layers(workspace_bytes=[7, 8], forward_workspace_bytes=0)
    for cost, size in zip(parse(LEAST | given, Path()).moments[0][1], (7, 8), strict=True):
        assert cost.workspace_bytes == cost.weight_workspace_bytes == size
        assert cost.forward_workspace_bytes == 0


def test_example_workload_file() -> None:
    workload = read(EXAMPLE)
    assert (workload.name, len(workload.names), workload.steps) == ("freezing", 48, 480)
    assert (workload.ranks, workload.replicas) == (8, 2)
    assert [step for step, _ in workload.moments] == list(range(0, 480, 20))
    trace = json.loads((EXAMPLE.parent / "workload-freezing.json").read_text())
    assert [x.f for x in workload.moments[3][1]] == pytest.approx(
        [0.004 * f for f in trace["f"][3]]
    )
    assert workload.moments[0][1][0].weight_bytes == 12_582_912
    outcome = replay(workload.model_copy(update={"microbatches": 16}))
    static, perfect = total(outcome.static), total(outcome.perfect)
    assert 1.15 < static / outcome.seconds < static / perfect < 6


def test_moments_after_the_last_step_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(
        json.dumps({"f": [[1], [2], [3]], "b": [[1]] * 3, "w": [[1]] * 3, "case": "x"})
    )
    given = {"ranks": 1, "steps": 2, "layers": {"trace": "t.json", "unit": 0.5}}
    workload = parse(LEAST | given, tmp_path)
    assert [(step, x[0].f) for step, x in workload.moments] == [(0, 0.5), (1, 1.5)]


def layers(**changes: Any) -> dict[str, Any]:
    return {"layers": {"moments": [MOMENT], **changes}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stepz": 3}, "unknown key 'stepz'; did you mean 'steps'?"),
        ({"steps": None}, "steps = None: must be a valid integer"),
        ({"ranks": 0}, "ranks = 0"),
        ({"policy": {"evry": 3}}, "unknown key 'policy.evry'; did you mean 'every'?"),
        ({"policy": {"cost": "money"}}, 'policy.cost = "money"'),
        ({"memory_limit": "much"}, 'memory_limit = "much": not a size'),
        ({"memory_limit": ["1GiB", "much"]}, 'memory_limit = ["1GiB", "much"]: not a size'),
        ({"memory_limit": [1]}, "memory_limit has 1 entries for 2 ranks"),
        ({"speeds": [1.0]}, "speeds has 1 entries for 2 ranks"),
        ({"speeds": [1.0, 0.0]}, "speeds[1] = 0.0: must be greater than 0"),
        ({"speeds": [1.0, -1.0]}, "speeds[1] = -1.0"),
        (layers(weight_bytes=[1]), "layers.weight_bytes has 1 entries"),
        (layers(weight_bytes=[1, -1]), "layers.weight_bytes[1] = -1"),
        (layers(names=["a"]), "layers.names has 1 entries"),
        (layers(trace="t.json"), "[layers] needs either trace"),
        ({"layers": {}}, "[layers] needs either trace"),
        ({"layers": {"trace": "none.json"}}, "none.json"),
        ({"layers": {"trace": 3}}, "layers.trace = 3"),
        ({"layers": [1]}, "layers = [1]: must be a section of keys"),
        ({"link": {"latencyy": 1}}, "unknown key 'link.latencyy'; did you mean 'latency'?"),
        (layers(moments=[MOMENT | {"g": [1.0]}]), "unknown key 'layers.moments.g'"),
        ({"policy": {"balancer": "best"}}, 'policy.balancer = "best"'),
        (layers(moments=[]), "[layers] needs either trace"),
        (layers(moments=[MOMENT | {"step": 1}]), "layers.moments begin at the steps [1]"),
        (layers(moments=[MOMENT, MOMENT]), "layers.moments begin at the steps [0, 0]"),
        (layers(moments=[MOMENT, MOMENT | {"step": 4}]), "the last begins at step 4"),
        (layers(moments=[MOMENT | {"b": [1.0]}]), "layers.moments[0].b has 1 entries"),
        (
            layers(moments=[MOMENT | {"b": [1.0, math.nan]}]),
            "layers.moments[0].b[1] = nan",
        ),
        (layers(moments=[{"step": 0, "f": [1.0]}]), "layers.moments[0].b: missing"),
        (layers(moments=[MOMENT | {"b": [0.0, 0.0], "w": [0.0, 0.0]}]), "b and w are 0"),
    ],
)
def test_a_wrong_value_is_refused_by_key(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as error:
        parse(LEAST | change, tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("{", "not JSON: "),
        ('{"f": [[1]], "b": [[1]]}', "t.json: w: missing"),
        (
            '{"f": [[1]], "b": [[1]], "w": [[NaN]]}',
            "t.json: w[0][0] = nan",
        ),
        ('{"f": [[1]], "b": [[1]], "w": [1]}', "t.json: w[0] = 1: must be a list"),
        ('{"f": [[1]], "b": [[1]], "w": []}', "f, b and w have [1, 1, 0] moments"),
        (
            '{"f": [[1, 1], [1]], "b": [[1, 1], [1, 1]], "w": [[1, 1], [1, 1]]}',
            "t.json: moments[1].f has 1 entries for 2 layers",
        ),
    ],
)
def test_a_wrong_trace_is_refused_by_place(trace: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(trace)
    with pytest.raises(InputError, match=re.escape(message)):
        parse(LEAST | {"layers": {"trace": "t.json"}}, tmp_path)


def test_speeds_and_memory_limits_of_ranks() -> None:
    """The slow rank gets fewer layers."""
    moment = {key: [1.0] * 9 for key in "fbw"} | {"step": 0}
    given = {"layers": {"moments": [moment], "weight_bytes": 100}, "steps": 30, "ranks": 3}
    workload = parse(LEAST | given | {"speeds": [1, 1, 0.25]}, Path())
    assert workload.speeds == (1, 1, 0.25)
    outcome = replay(workload)
    assert outcome.partitions[-1] == (4, 4, 1)
    assert total(outcome.perfect) < outcome.seconds < total(outcome.static)
    limited = parse(LEAST | given | {"memory_limit": ["1KiB", 200, "1 KB"]}, Path())
    assert limited.memory_limit == (1024, 200, 1000)


def test_initial_placement_of_another_size_is_refused() -> None:
    with pytest.raises(InputError, match=r"policy\.initial counts 2 layers on 1 stages"):
        replay(parse(LEAST | {"policy": {"initial": [2]}}, Path()))


# -- the fewest ranks of each moment ---------------------------------------------------------------

WHOLE = LayerCost(1.0, 1.0, 1.0, weight_bytes=100)
SMALL = LayerCost(0.3, 0.3, 0.3, weight_bytes=100)
MOMENTS = [Moment.of(step, (cost,) * 8) for step, cost in ((0, WHOLE), (10, SMALL), (30, WHOLE))]


def growing(**given: Any) -> Workload:
    return Workload(
        steps=40, ranks=4, microbatches=8, layers=LayerSection(moments=MOMENTS), **given
    )


def test_small_model_needs_fewer_ranks_than_a_large_model() -> None:
    rows = ranks_needed(growing(), 0.0)
    assert [(row.first, row.last) for row in rows] == [(0, 9), (10, 29), (30, 39)]
    assert [row.ranks for row in rows] == [4, 2, 4]
    assert all(sum(row.layers) == 8 for row in rows)
    assert rows[1].seconds <= rows[0].seconds
    assert mean_ranks(rows) == 3.0


def test_tolerance_allows_fewer_ranks() -> None:
    assert [row.ranks for row in ranks_needed(growing(), 4.0)] == [1, 1, 1]


def test_memory_limit_requires_more_ranks() -> None:
    """Four layers fit on a rank."""
    rows = ranks_needed(growing(memory_limit=450), 2.5)
    assert [row.ranks for row in rows] == [2, 2, 2]
    with pytest.raises(InputError):
        ranks_needed(growing(memory_limit=150), 0.0)


def test_ranks_needed_with_several_stages_per_rank() -> None:
    rows = ranks_needed(growing(schedule="zb-v"), 0.0)
    assert rows[0].ranks == 4
    assert rows[1].ranks <= 2
    assert len(rows[1].layers) == 2 * rows[1].ranks
