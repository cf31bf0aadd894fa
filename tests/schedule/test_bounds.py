from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Kind, Op, Schedule, dependencies
from dynmo.schedule.simulator import simulate
from tests.combinations import mostly_matrix
from tests.schedule.samples import BY_HAND, schedules, stage, whole_costs


@given(schedules(several=False), st.sampled_from(Objective), st.data())
def test_no_schedule_is_below_the_bound(
    schedule: Schedule, objective: Objective, data: st.DataObject
) -> None:
    costs = data.draw(whole_costs(schedule.stages))
    timeline = simulate(schedule, costs)
    m, first = schedule.microbatches, schedule.first_trainable
    # The same holds if the caps are what the schedule needs.
    for caps in (None, timeline.peak_memory):
        assert lower_bound(costs, m, first, objective, caps) <= timeline.length(objective)


@given(
    st.sampled_from(BY_HAND),
    st.integers(1, 6),
    st.integers(1, 15),
    st.sampled_from(Objective),
    st.data(),
)
def test_no_published_schedule_is_below_the_bound(
    name: str, p: int, m: int, objective: Objective, data: st.DataObject
) -> None:
    costs, first_trainable = data.draw(whole_costs(p)), data.draw(st.integers(0, p - 1))
    timeline = simulate(make(name, p, m, first_trainable=first_trainable), costs)
    assert lower_bound(costs, m, first_trainable, objective) <= timeline.length(objective)


@given(st.integers(1, 6), st.data())
def test_bound_is_exact_for_one_microbatch(p: int, data: st.DataObject) -> None:
    costs, first_trainable = data.draw(whole_costs(p)), data.draw(st.integers(0, p - 1))
    timeline = simulate(make("zb-h1", p, 1, first_trainable=first_trainable), costs)
    assert lower_bound(costs, 1, first_trainable, Objective.MAKESPAN) == timeline.makespan
    if first_trainable == 0:
        assert lower_bound(costs, 1) == timeline.span


@given(st.integers(1, 8), st.data())
def test_bound_is_exact_for_few_microbatches_of_equal_times(p: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(1, p))
    costs = uniform_costs(p, 1, 1, 1)
    span = simulate(make("zb-h1", p, m), costs).span
    assert lower_bound(costs, m) == (m + p - 1) * 2 + 1 == span


def test_bound_matches_a_hand_computed_example() -> None:
    # Rank 1 is the busiest (4 x 6). Before it lie F and the link of rank 0. After it lie the link,
    # B and W of rank 0.
    costs = Costs((StageCost(1, 1, 1), StageCost(2, 2, 2)), (0.5,))
    assert lower_bound(costs, 4) == 24
    # m W = 8 on rank 1 can hide the drain of 2.5, so only the 1.5 before rank 1's first F are
    # added.
    assert lower_bound(costs, 4, objective=Objective.MAKESPAN) == 25.5
    # Nothing hides the drain if rank 1 has no W.
    costs = Costs((StageCost(1, 1, 1), StageCost(2, 4, 0)), (0.5,))
    assert lower_bound(costs, 4, objective=Objective.MAKESPAN) == 1.5 + 24 + 2.5
    # A frozen rank 0 is busy with its F's alone, and nothing drains.
    assert lower_bound(costs, 4, 1, Objective.MAKESPAN) == 1.5 + 24
    costs = Costs((StageCost(9, 0, 0), StageCost(2, 4, 0)), (0.5,))
    assert lower_bound(costs, 4, 1) == 36
    assert lower_bound(costs, 4, 1, Objective.MAKESPAN) == 36 + 0.5 + 2 + 4
    # A long F comes before a long way. The last of 3 microbatches leaves rank 0 at 15, is away for
    # 6 and needs B there.
    costs = Costs((StageCost(5, 1, 0), StageCost(3, 1, 0)), (0,))
    assert lower_bound(costs, 3) == 15 + 4 + 1
    # With a longer B there, rank 1 is busy from 5 on, and rank 0 has a B left when it ends.
    costs = Costs((StageCost(5, 1, 0), StageCost(3, 3, 0)), (0,))
    assert lower_bound(costs, 3) == 5 + 18 + 1


def test_bound_under_memory_caps_matches_a_hand_computation() -> None:
    # Rank 0 has one microbatch at a time: F, 2 out and back, B, four times. The W's fit in all
    # trips but the last.
    costs = Costs((StageCost(1, 1, 1, 1, -1, 0), StageCost(1, 1, 1)), (0,))
    assert lower_bound(costs, 4) == 12
    assert lower_bound(costs, 4, caps=[1, 9]) == 4 * 4 + 1
    # If its W must come first, it lies in no trip.
    costs = Costs((StageCost(1, 1, 1, 1, 0, -1), StageCost(1, 1, 1)), (0,))
    assert lower_bound(costs, 4, caps=[1, 9]) == 4 * (4 + 1)
    # ZB-1p: rank 0 waits (p - 1) B for its first B and (p - 1) (F - W) for its last one.
    costs = uniform_costs(4, 3, 4, 2)
    span = simulate(make("zb-h1", 4, 12), costs).span
    assert lower_bound(costs, 12, caps=[4] * 4) == 12 * 9 + 3 * (3 + 4 - 2) == span
    assert lower_bound(costs, 12, caps=[8] * 4) == 12 * 9
    # A second F leaves no room for the first B if B adds what W takes away.
    costs = Costs((StageCost(1, 1, 1, 1, 1, -2), StageCost(1, 1, 1)), (0,))
    assert lower_bound(costs, 3, caps=[2, 9]) == 3 * 4 + 3
    # A limit on a frozen stage limits nothing.
    assert lower_bound(costs, 3, 1, caps=[0, 9]) == lower_bound(costs, 3, 1)


@cache
def rows(m: int, f: int = 0, b: int = 0, w: int = 0) -> list[list[tuple[Kind, int]]]:
    """Every order of one rank's ops, each kind in microbatch order."""
    if w == m:
        return [[]]
    out: list[list[tuple[Kind, int]]] = []
    if f < m:
        out += [[(Kind.F, f), *rest] for rest in rows(m, f + 1, b, w)]
    if b < f:
        out += [[(Kind.B, b), *rest] for rest in rows(m, f, b + 1, w)]
    if w < b:
        out += [[(Kind.W, w), *rest] for rest in rows(m, f, b, w + 1)]
    return out


def live(cost: StageCost, order: list[tuple[Kind, int]]) -> float:
    changes = {Kind.F: cost.mem_f, Kind.B: cost.mem_b, Kind.W: cost.mem_w}
    return max(accumulate(changes[kind] for kind, _ in order))


def best(costs: Costs, m: int, caps: Sequence[float] | None = None) -> dict[Objective, float]:
    """The least of all orders within the caps, by trying each."""
    shortest = dict.fromkeys(Objective, float("inf"))
    fitting = [
        [order for order in rows(m) if caps is None or live(cost, order) <= caps[rank]]
        for rank, cost in enumerate(costs.stages)
    ]
    for orders in product(*fitting):
        ops = tuple(
            tuple(Op(kind, rank, j) for kind, j in order) for rank, order in enumerate(orders)
        )
        try:
            timeline = simulate(Schedule("tried", m, tuple(range(len(orders))), ops), costs)
        except ScheduleError:
            continue
        for objective in Objective:
            shortest[objective] = min(shortest[objective], timeline.length(objective))
    return shortest


@pytest.mark.parametrize(("p", "m"), mostly_matrix([(2, 2), (3, 2), (2, 3)], [(2, 2), (3, 2)]))
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data())
def test_bound_is_at_most_the_best_of_all_orders(p: int, m: int, data: st.DataObject) -> None:
    costs = data.draw(whole_costs(p))
    caps = [
        max(cost.mem_f, cost.mem_f + cost.mem_b) + data.draw(st.integers(0, 12))
        for cost in costs.stages
    ]
    for limits in (None, caps):
        for objective, least in best(costs, m, limits).items():
            assert lower_bound(costs, m, objective=objective, caps=limits) <= least * (1 + 1e-12)
            # The schedule of zb-auto is the best there is in all but a few cases of this size.
            schedule = automatic(costs, m, caps=limits, objective=objective)
            assert least <= simulate(schedule, costs).length(objective)


@pytest.mark.parametrize("draws", mostly_matrix([6, 30], everyday=[6]))
def test_bound_and_search_meet_in_most_small_cases(draws: int) -> None:
    rng, met, optimal, cases = random.Random(0), 0, 0, 0
    for _ in range(draws):
        stages: list[StageCost] = []
        for _ in range(2):
            stash, more, f, b, w = (rng.randint(least, 6 + 3 * least) for least in (0, 0, 1, 1, 1))
            stages.append(stage(f, b, w, stash + more, stash))
        costs = Costs(tuple(stages), (rng.randint(0, 4),))
        caps = [cost.mem_f * rng.randint(1, 3) + rng.randint(0, 3) for cost in stages]
        for objective, least in best(costs, 3, caps).items():
            cases += 1
            met += lower_bound(costs, 3, objective=objective, caps=caps) == pytest.approx(least)
            schedule = automatic(costs, 3, caps=caps, objective=objective)
            optimal += simulate(schedule, costs).length(objective) == pytest.approx(least)
    assert optimal == cases
    assert met >= 0.8 * cases


def test_bound_equals_the_best_of_all_orders_for_equal_times() -> None:
    costs = uniform_costs(3, 2, 2, 2, 1)
    bounds = {objective: lower_bound(costs, 2, objective=objective) for objective in Objective}
    assert best(costs, 2) == bounds


# Several stages per rank.


def greedy(
    placement: tuple[int, ...], costs: Costs, m: int, first: int, rng: random.Random
) -> Schedule:
    """Each rank in turn takes any op that may run: a schedule of no particular merit."""
    ranks, stages = max(placement) + 1, len(placement)
    rows: list[list[Op]] = [[] for _ in range(ranks)]
    shell = Schedule("greedy", m, placement, tuple(() for _ in rows), first, credits=m)
    left = {
        (kind, s): 0
        for s in range(stages)
        for kind in (Kind.F, *((Kind.B, Kind.W) if s >= first else ()))
    }
    done: set[Op] = set()
    while left:
        kind, s = rng.choice(list(left))
        op = Op(kind, s, left[kind, s])
        if all(d.op in done for d in dependencies(shell, op)):
            rows[placement[s]].append(op)
            done.add(op)
            left[kind, s] += 1
            if left[kind, s] == m:
                del left[kind, s]
    return Schedule("greedy", m, placement, tuple(map(tuple, rows)), first, credits=m)


@pytest.mark.parametrize(
    "placement", [(0, 1, 1, 0), (0, 1, 0, 1), (0, 0), (0, 1, 2, 2, 1, 0), (2, 0, 1), (1, 0, 0, 1)]
)
@pytest.mark.parametrize("objective", Objective)
def test_no_schedule_of_several_stages_is_below_the_bound(
    placement: tuple[int, ...], objective: Objective
) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        stages = tuple(StageCost(*(rng.choice((0, 1, 2, 5)) for _ in range(3))) for _ in placement)
        costs = Costs(stages, tuple(rng.choice((0, 1, 3)) for _ in placement[1:]))
        first, m = rng.randrange(len(placement)), rng.randint(1, 5)
        line = simulate(greedy(placement, costs, m, first, rng), costs)
        bound = lower_bound(costs, m, first, objective, stage_ranks=placement)
        assert bound <= line.length(objective) + 1e-9, seed


def test_links_within_a_rank_cost_nothing() -> None:
    costs = Costs((StageCost(1, 1, 1), StageCost(1, 1, 1)), (3.0,))
    assert lower_bound(costs, 1, stage_ranks=(0, 0)) == 6


def test_caps_belong_to_ranks() -> None:
    costs = uniform_costs(3, 1, 1, 1)
    moved = lower_bound(costs, 6, caps=[9.0, 1.0, 9.0], stage_ranks=(2, 0, 1))
    assert moved == lower_bound(costs, 6, caps=[9.0, 9.0, 1.0])


def test_bound_of_an_even_v_is_close_to_the_work_of_a_rank() -> None:
    """Two ranks hold two equal halves each, and a V nearly reaches the bound."""
    bound = lower_bound(uniform_costs(4, 1, 1, 1), 8, stage_ranks=(0, 1, 1, 0))
    assert bound == pytest.approx(48, rel=0.1)
