from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from dynmo.cost.input_file import Link
from dynmo.cost.layer_cost import LayerCost
from dynmo.errors import InputError
from dynmo.plan.costs import frozen_stages, pipeline_costs
from dynmo.plan.partition import Partition
from dynmo.plan.pays import Change, Interval, pays
from dynmo.plan.replay import StepTime, mean_ranks, ranks_needed, replay
from dynmo.plan.workload import LayerSection, Moment, Policy, Workload
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
