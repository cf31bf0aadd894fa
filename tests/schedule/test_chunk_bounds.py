"""Several stages per rank: no schedule is below the bound."""

from __future__ import annotations

import random

import pytest

from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.op import Kind, Op, Schedule, dependencies
from dynmo.schedule.simulator import simulate


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
def test_no_schedule_is_below_the_bound(placement: tuple[int, ...], objective: Objective) -> None:
    for seed in range(30):
        rng = random.Random(seed)
        stages = tuple(StageCost(*(rng.choice((0, 1, 2, 5)) for _ in range(3))) for _ in placement)
        costs = Costs(stages, tuple(rng.choice((0, 1, 3)) for _ in placement[1:]))
        first, m = rng.randrange(len(placement)), rng.randint(1, 5)
        line = simulate(greedy(placement, costs, m, first, rng), costs)
        bound = lower_bound_on(placement, costs, m, first, objective)
        assert bound <= line.length(objective) + 1e-9, seed


def test_links_within_a_rank_cost_nothing() -> None:
    costs = Costs((StageCost(1, 1, 1), StageCost(1, 1, 1)), (3.0,))
    assert lower_bound_on((0, 0), costs, 1) == 6


def test_bound_for_one_stage_per_rank_equals_the_plain_bound() -> None:
    costs, caps = uniform_costs(4, 1, 2, 1, 0.5), [4.0] * 4
    assert lower_bound_on(range(4), costs, 6, caps=caps) == lower_bound(costs, 6, caps=caps)
    costs = uniform_costs(3, 1, 1, 1)
    moved = lower_bound_on((2, 0, 1), costs, 6, caps=[9.0, 1.0, 9.0])
    assert moved == lower_bound(costs, 6, caps=[9.0, 9.0, 1.0])


def test_bound_of_an_even_v_is_close_to_the_work_of_a_rank() -> None:
    """Two ranks hold two equal halves each, and a V nearly reaches the bound."""
    assert lower_bound_on((0, 1, 1, 0), uniform_costs(4, 1, 1, 1), 8) == pytest.approx(48, rel=0.1)
