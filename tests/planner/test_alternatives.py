"""Alternatives of a plan: other balancers, schedules, ranks and microbatches."""

from __future__ import annotations

from dynmo.planner.alternatives import (
    other_balancers,
    other_microbatches,
    other_ranks,
    other_schedules,
)
from dynmo.planner.evaluate import PlanRequest
from dynmo.schedule.catalogue import SCHEDULES
from tests.planner.test_make_plan import profile, replayed


def test_alternatives_of_a_plan() -> None:
    request = PlanRequest(profile(12), 3, 6)
    balancers = other_balancers(request)
    schedules = other_schedules(request)
    ranks = other_ranks(request)
    microbatches = other_microbatches(request)
    assert {x.choice for x in balancers} >= {
        "uniform",
        "schedule-aware",
        "diffusion",
        "deepspeed-time",
    }
    assert {x.choice for x in schedules} == set(SCHEDULES) - {"zb-h1"}
    assert {x.choice for x in ranks} == {1, 2, 4, 5, 6}
    # Microbatches have 4 sequences. 24 sequences fit in 12 of 2, or 24 of 1, or 3 of 8, but not in
    # 1.5.
    assert [x.choice for x in sorted(microbatches, key=lambda x: int(x.choice))] == [3, 12, 24]
    for alternatives in (balancers, schedules, ranks, microbatches):
        steps = [x.plan.step for x in alternatives if x.plan is not None]
        assert steps == sorted(steps)
        assert all((x.plan is None) == (x.problem is not None) for x in alternatives)
        for x in alternatives:
            if x.plan is not None:
                replayed(x.plan)
