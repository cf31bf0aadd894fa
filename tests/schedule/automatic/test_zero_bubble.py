from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from pathlib import Path
from statistics import mean, median
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.jit import jit
from dynmo.schedule.automatic._zero_bubble_loops import polish, search
from dynmo.schedule.automatic.case import make_case
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import validate
from dynmo.schedule.simulator import Timeline, peak_memory, simulate
from tests.schedule.samples import PUBLISHED, TABLE_5, fits, stage, times_of


def table_5(row: dict) -> tuple[Costs, int, int]:
    return uniform_costs(row["ranks"], *times_of(row)), row["ranks"], row["microbatches"]


def test_memory_of_1f1b_gives_zb_h1_and_twice_gives_no_bubble() -> None:
    # With the memory of 1F1B the schedule is ZB-H1's. With twice as much no rank waits once it has
    # started.
    costs = uniform_costs(3, 1, 1, 1)
    tight, wide = automatic(costs, 6, caps=[3] * 3), automatic(costs, 6, caps=[6] * 3)
    assert simulate(tight, costs).span == simulate(make("zb-h1", 3, 6), costs).span == 20
    assert simulate(wide, costs).span == 18
    assert (
        str(automatic(costs, 3, caps=[3] * 3))
        == """\
# zb-auto  ranks=3 microbatches=3 placement=0,1,2
0 | F0 F1 F2 B0 W0 B1 W1 B2 W2
1 | F0 F1 F2 B0 W0 B1 W1 B2 W2
2 | F0 B0 F1 B1 F2 B2 W0 W1 W2
"""
    )


@pytest.mark.parametrize("row", PUBLISHED)
def test_bubble_is_at_most_the_published_ratio(row: dict) -> None:
    costs, p, m = table_5(row)
    for k in (1, 2):
        schedule = automatic(costs, m, caps=[k * p] * p)
        assert fits(schedule, costs, [k * p] * p)
        bubble = simulate(schedule, costs).bubble_ratio
        assert round(bubble, 4) <= row["bubble"][f"zb-{k}p"]
        # At the memory of 1F1B the bound is met: nothing is left to find.
        bound = 1 - m * costs.stages[0].seconds / lower_bound(costs, m, caps=[k * p] * p)
        assert bound <= bubble + 1e-9
        if k == 1:
            assert bubble == pytest.approx(bound)


@pytest.mark.matrix
def test_bubble_beats_the_published_ratio_if_the_bound_allows() -> None:
    better = room = 0
    for row in TABLE_5:
        costs, p, m = table_5(row)
        for k in (1, 2):
            bound = 1 - m * costs.stages[0].seconds / lower_bound(costs, m, caps=[k * p] * p)
            if round(bound, 4) < row["bubble"][f"zb-{k}p"]:
                room += 1
                found = simulate(automatic(costs, m, caps=[k * p] * p), costs).bubble_ratio
                better += round(found, 4) < row["bubble"][f"zb-{k}p"]
    assert room == 10
    assert better >= 9


@given(st.integers(1, 12), st.data())
def test_schedule_is_optimal_for_few_microbatches_of_equal_times(
    p: int, data: st.DataObject
) -> None:
    # The best there is for m <= p, and ZB-H1 misses it where W < F.
    m, f, b = (data.draw(st.integers(1, most)) for most in (p, 9, 9))
    w = data.draw(st.integers(0, f))
    costs = uniform_costs(p, f, b, w)
    for objective in Objective if w <= b else (Objective.SPAN,):
        timeline = simulate(automatic(costs, m, objective=objective), costs)
        assert timeline.length(objective) == (m + p - 1) * (f + b) + w


@st.composite
def cases(draw: st.DrawFn) -> tuple[Costs, int, list[float], int]:
    """A B frees or takes memory. The caps go down to the least for one microbatch."""
    p, m = draw(st.integers(1, 6)), draw(st.integers(1, 14))
    times = st.integers(0, 9)
    stages: list[StageCost] = []
    caps: list[float] = []
    first_trainable = draw(st.integers(0, p - 1))
    for rank in range(p):
        activation, stash = draw(st.integers(0, 6)), draw(st.integers(0, 6))
        trains = rank >= first_trainable
        f, b, w = draw(times), draw(times) * trains, draw(times) * trains
        stages.append(stage(f, b, w, activation, stash))
        room = draw(st.one_of(st.just(math.inf), st.integers(0, 12)))
        caps.append(room + max(activation, stash) * trains)
    return Costs(tuple(stages), tuple(draw(times) for _ in range(p - 1))), m, caps, first_trainable


@given(cases(), st.sampled_from(Objective))
def test_schedule_is_valid_and_within_caps(
    case: tuple[Costs, int, list[float], int], objective: Objective
) -> None:
    costs, m, caps, first = case
    schedule = automatic(costs, m, caps=caps, first_trainable=first, objective=objective)
    validate(schedule)
    assert (schedule.name, schedule.microbatches) == ("zb-auto", m)
    assert schedule.first_trainable == first
    assert schedule.stage_ranks == tuple(range(len(costs.stages)))
    assert fits(schedule, costs, caps)
    time = simulate(schedule, costs).length(objective)
    assert lower_bound(costs, m, first, objective, caps) <= time * (1 + 1e-9)
    # A budget in ops, not in seconds: what is made is always the same, and no worse than what is
    # made by hand.
    again = automatic(costs, m, caps=caps, first_trainable=first, objective=objective)
    assert again == schedule
    # (1F1B's fused backward hides the memory that a B takes until its W, so it is left out where
    # one does.)
    hides = any(cost.mem_b > 0 for cost in costs.stages)
    for name in ("1f1b", "zb-h1", "zb-h2")[hides:]:
        by_hand = make(name, len(costs.stages), m, first_trainable=first)
        if fits(by_hand, costs, caps):
            assert time <= simulate(by_hand, costs).length(objective) * (1 + 1e-9)


def test_schedule_behind_a_frozen_prefix_is_no_worse_than_the_one_made_by_hand() -> None:
    p, m, first = 16, 36, 9
    stages = [stage(3, 2, 1, 2, 1) if s >= first else stage(3, 0, 0, 2, 1) for s in range(p)]
    stages[13] = stage(6, 2, 1, 2, 1)
    costs = Costs(tuple(stages), (2.0,) * (p - 1))
    by_hand = make("zb-h2", p, m, first_trainable=first)
    found = automatic(costs, m, caps=peak_memory(by_hand, costs), first_trainable=first)
    assert simulate(found, costs).span <= simulate(by_hand, costs).span == 358


def uneven(rng: random.Random) -> tuple[Costs, Costs, int, list[float], int]:
    """Costs, the same with median times, m, caps and the first trainable stage."""
    p = rng.randint(2, 12)
    m, spread, first = rng.randint(1, 4 * p), rng.uniform(0, 0.6), rng.choice((0, 0, 0, 0, p // 3))
    base = (10.0, rng.uniform(8, 14), rng.uniform(4, 10))
    times = [[x * (1 + rng.uniform(-spread, spread)) for x in base] for _ in range(p)]
    middle = [median(column) for column in zip(*times[first:], strict=True)]
    memory = [(x := rng.uniform(0.6, 1.4), x * rng.uniform(0.2, 0.8)) for _ in range(p)]
    caps = [held * rng.uniform(1, 2) * p for held, _ in memory]
    links = tuple(rng.uniform(0, 2) for _ in range(p - 1))

    def costs(rows: list[list[float]]) -> Costs:
        stages: list[StageCost] = []
        for (f, b, w), held in zip(rows, memory, strict=True):
            trains = len(stages) >= first
            stages.append(stage(f, b * trains, w * trains, *held))
        return Costs(tuple(stages), links)

    return costs(times), costs([middle] * p), m, caps, first


def test_uneven_costs_give_shorter_schedules_than_mean_costs() -> None:
    rng = random.Random(0)
    spans: list[tuple[float, float]] = []
    for _ in range(40):
        costs, flat, m, caps, first = uneven(rng)
        known, blind = (
            automatic(given, m, caps=caps, first_trainable=first) for given in (costs, flat)
        )
        assert fits(known, costs, caps)
        spans.append((simulate(known, costs).span, simulate(blind, costs).span))
    assert mean(known / blind for known, blind in spans) < 1 - 0.015


@pytest.mark.parametrize("p", [1, 5])
@pytest.mark.parametrize("m", [1, 7])
@pytest.mark.parametrize("scale", [0.0, 1e-310, 1e300])
def test_span_scales_with_the_unit_of_time(p: int, m: int, scale: float) -> None:
    def span(unit: float) -> float:
        costs = uniform_costs(p, unit, unit, unit, unit / 4)
        return simulate(automatic(costs, m, caps=[2 * p] * p), costs).span

    assert span(scale) == pytest.approx(scale * span(1.0), rel=1e-6)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"first_trainable": 3}, "first trainable stage 3 of 3"),
        ({"caps": [1, 2]}, "2 memory limits for 3 ranks"),
        ({"caps": [9, 0.5, 9]}, "stage 1 needs 1, over its limit of 0.5"),
        ({"caps": [9, 9, math.nan]}, "stage 2 needs 1, over its limit of nan"),
        ({"caps": [-1, 9, 9]}, "stage 0 needs 1, over its limit of -1"),
    ],
)
def test_bad_requests_are_refused(keywords: dict, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        make("zb-auto", 3, 4, **keywords)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_memory_that_b_adds_counts() -> None:
    # F takes 1, B another 0.5 before W frees all: 1.5 is needed, and with less than 2.5 one
    # microbatch at a time.
    stage = StageCost(1, 1, 1, 1, 0.5, -1.5)
    costs = Costs((stage, stage), (0.0,))
    with pytest.raises(ScheduleError, match=r"stage 0 needs 1.5, over its limit of 1.4"):
        automatic(costs, 3, caps=[1.4, 2])
    schedule = automatic(costs, 3, caps=[1.5, 2.4])
    assert peak_memory(schedule, costs) == (1.5, 1.5)


def test_a_frozen_prefix_has_no_limit() -> None:
    costs, caps = uniform_costs(4, 1, 1, 1), [0, 0, 2, 2]
    assert fits(automatic(costs, 9, caps=caps, first_trainable=2), costs, caps)


def test_makespan_and_span_give_different_schedules() -> None:
    def both(costs: Costs, m: int, cap: float) -> list[Timeline]:
        caps = [cap] * len(costs.stages)
        made = (automatic(costs, m, caps=caps, objective=objective) for objective in Objective)
        return [simulate(schedule, costs) for schedule in made]

    costs, p, m = table_5(TABLE_5[3])
    by_span, by_makespan = both(costs, m, 2 * p)
    assert by_span.span < by_makespan.span
    least = lower_bound(costs, m, 0, Objective.MAKESPAN, [2 * p] * p)
    assert by_makespan.makespan == pytest.approx(least)
    by_span, by_makespan = both(uniform_costs(3, 1, 1, 2, 0.5), 6, 3)
    assert by_makespan.makespan == 28 < by_span.makespan


def test_search_stops_at_its_step_budget() -> None:
    rng = np.random.default_rng(0)
    p, m, budget = 6, 20, 30_000
    stages = tuple(StageCost(*rng.uniform(1, 2, 3)) for _ in range(p))
    costs = Costs(stages, tuple(rng.uniform(1, 2, p - 1)))
    case = make_case(costs, m, range(p), [7.0] * p, 0, Objective.MAKESPAN)
    starts = np.array([[[7] * p, [1] * p, [2] * p, [99] * p]])
    _, spent, order = search(case, 0.0, budget, starts, np.full(p, m))
    assert budget <= spent <= budget + 5 * 3 * p * m
    lanes, first = order.ravel().astype(np.int64), 3 * m * np.arange(p + 1)
    _, replayed = polish(case, case.delay[None], np.zeros(p), 0.0, budget, first, lanes[None])
    assert budget <= replayed <= budget + 5 * 3 * p * m


def test_effort_is_how_often_a_rank_is_looked_at() -> None:
    case = make_case(uniform_costs(1, 1, 1, 1), 5, range(1), [9.0], 0, Objective.SPAN)
    _, spent, _ = search(case, 0.0, 1, np.array([[[5], [0], [2], [99]]]), np.array([5]))
    assert spent == 3 * 5  # a rank that is alone never waits


def test_compilation_works_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def nowhere(cache: bool = False, **options: Any) -> object:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    njit = numba.njit
    monkeypatch.setattr(numba, "njit", nowhere)
    assert jit()(lambda x: x + 1)(1) == 2
    assert asked == [True, False]


@pytest.mark.matrix
def test_another_process_makes_the_same_schedule_silently(tmp_path: Path) -> None:
    code = (
        "from dynmo.cost.layer_cost import uniform_costs; from "
        "dynmo.schedule.automatic.zero_bubble import automatic; "
        "print(automatic(uniform_costs(5, 3, 4, 2, 0.5), 11, caps=[7] * 5), end='')"
    )
    # `-W always`: numba's warnings about its cache must not surface, either.
    command = [sys.executable, "-W", "always", "-c", code]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=True, env=environment
    )
    assert done.stdout == str(automatic(uniform_costs(5, 3, 4, 2, 0.5), 11, caps=[7] * 5))
    assert done.stderr == ""
