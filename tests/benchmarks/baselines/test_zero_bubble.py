"""The Zero Bubble paper's heuristic, written from its description."""

import pytest

from benchmarks.baselines.zero_bubble import heuristic, median_costs
from benchmarks.published import costs_of, table_5
from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.op import validate
from dynmo.schedule.simulator import simulate


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("row", table_5()[:7:2], ids=lambda x: f"{x['model']} {x['microbatches']}")
def test_bubbles_are_those_of_the_paper(row, k):
    costs, p = costs_of(row), row["ranks"]
    schedule = heuristic(costs, row["microbatches"], [float(k * p)] * p)
    validate(schedule)
    timeline = simulate(schedule, costs)
    assert timeline.bubble_ratio == pytest.approx(row["bubble"][f"zb-{k}p"], abs=6e-5)
    assert max(timeline.peak_memory) <= k * p * (1 + 1e-9)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 3), (2, 1), (4, 2), (4, 4), (5, 11)])
def test_schedules_are_complete_within_memory(p, m):
    stages = tuple(StageCost(1 + r % 3, 2 - r % 2, 1 + r % 2) for r in range(p))
    costs = Costs(stages, (0.1,) * (p - 1))
    schedule = heuristic(costs, m, [float(p)] * p)
    validate(schedule)
    assert max(simulate(schedule, costs).peak_memory) <= p


def test_a_rank_must_hold_one_microbatch_more_than_the_next():
    costs = uniform_costs(3, 1, 1, 1)
    validate(heuristic(costs, 9, [3, 2, 1]))
    with pytest.raises(ScheduleError, match="rank 2 has no memory"):
        heuristic(costs, 9, [2, 2, 2])


def test_median_costs_keep_the_memory():
    stages = (StageCost(1, 2, 3, 1, -1, 0), StageCost(2, 2, 2), StageCost(9, 1, 1))
    fed = median_costs(Costs(stages, (1, 3)))
    assert [(x.f, x.b, x.w) for x in fed.stages] == [(2, 2, 2)] * 3
    assert [x.mem_b for x in fed.stages] == [-1, -0.5, -0.5]
    assert fed.links == (2, 2)
