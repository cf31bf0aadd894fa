"""Alternatives of a plan, and what would fit the memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo.errors import InputError, PartitionError
from dynmo.plan.alternatives import (
    other_balancers,
    other_microbatches,
    other_ranks,
    other_schedules,
    plan_or_suggest,
)
from dynmo.plan.plan_request import PlanRequest
from dynmo.schedule.catalogue import SCHEDULES
from tests.plan.test_make_plan import profile, replayed


def test_alternatives_of_a_plan() -> None:
    request = PlanRequest(profile(12), 3, 6)
    balancers = other_balancers(request)
    schedules = other_schedules(request)
    ranks = other_ranks(request)
    microbatches = other_microbatches(request)
    assert {x.choice for x in balancers} == {"uniform", "diffusion"}
    assert {x.choice for x in schedules} == set(SCHEDULES) - {"zb-h1"}
    assert {x.choice for x in ranks} == {1, 2, 4, 5, 6}
    # Microbatches have 4 sequences. 24 sequences fit in 12 of 2, or 24 of 1, or 3 of 8, but not in
    # 1.5.
    assert [x.choice for x in sorted(microbatches, key=lambda x: int(x.choice))] == [3, 12, 24]
    for alternatives in (balancers, schedules, ranks, microbatches):
        assert all((x.plan is None) == (x.problem is not None) for x in alternatives)
        plans = [x.plan for x in alternatives if x.plan is not None]
        assert [plan.step for plan in plans] == sorted(plan.step for plan in plans)
        for plan in plans:
            replayed(plan)


def test_smaller_microbatches_scale_time_and_activations() -> None:
    plan = {x.choice: x.plan for x in other_microbatches(PlanRequest(profile(12), 3, 6))}[12]
    assert plan is not None
    for small, whole in zip(plan.request.layers, profile(12).layers, strict=True):
        assert (small.f, small.static_bytes) == (whole.f / 2, whole.static_bytes)
        assert small.activation_bytes == -(-whole.activation_bytes // 2)


def told(request: PlanRequest) -> str:
    with pytest.raises(InputError) as error:
        plan_or_suggest(request)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refused_plan_suggests_a_plan_that_fits() -> None:
    usual = PlanRequest(profile(12), 3, 6, "1f1b")
    first, *rest = usual.profile.layers
    heavy = replace(first, f=4.0, b=4.0, w=4.0, weight_bytes=3000, activation_bytes=300)
    known = replace(usual.profile, layers=(heavy, *rest))
    request = replace(usual, profile=known, balancer="uniform")
    plan = plan_or_suggest(request)
    most = max(plan.memory)
    line = told(replace(request, memory_limit=most - 1))
    assert line.startswith(
        f"rank {plan.memory.index(most)} (layers 0 to 3) needs {most} bytes under 1f1b with the "
        f"placement 4+4+4, over"
    )
    assert "; the balancer 'exact' would fit: " in line
    least = max(plan_or_suggest(usual).memory)
    for share, says in ((0.95, "; the schedule zb-auto would fit: "), (0.7, " ranks with ")):
        assert says in told(replace(usual, memory_limit=round(least * share)))
    assert "; nothing that was tried fits" in told(replace(request, memory_limit=1000))


def test_suggested_plan_fits() -> None:
    for seed in range(4):
        known = profile(12, seed)
        limit = round(max(plan_or_suggest(PlanRequest(known, 3, 6, "zb-h1")).memory) * 0.97)
        request = PlanRequest(known, 3, 6, "zb-h1", memory_limit=limit)
        try:
            replayed(plan_or_suggest(request))
        except PartitionError as error:
            name = str(error).split("the schedule ")[1].split(" would")[0]
            replayed(plan_or_suggest(replace(request, schedule=name)))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (PlanRequest(profile(), 3, 6, "zb-h3"), "unknown schedule 'zb-h3'"),
        (PlanRequest(profile(), 3, 6, balancer="best"), "unknown balancer 'best'"),
        (
            PlanRequest(profile(), 3, 7, "interleaved-1f1b"),
            "7 microbatches are not a multiple of 3 ranks",
        ),
        (PlanRequest(profile(), 3, 6, "zb-h1", chunks=2), "zb-h1 has 1 stage a rank, not 2"),
        (PlanRequest(profile(), 13, 6), "13 ranks need at least 13 layers"),
        (PlanRequest(replace(profile(), links=(), comm=(1.0,) * 3), 3, 6), "comm has 3 numbers"),
    ],
)
def test_bad_input_is_refused_without_a_suggestion(wanted: PlanRequest, message: str) -> None:
    assert message in told(wanted)
    assert message in told(replace(wanted, memory_limit=10**9))
