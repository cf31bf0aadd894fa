from __future__ import annotations

from dataclasses import replace

import pytest

from dynmo.errors import InputError, PartitionError
from dynmo.planner.alternatives import plan_or_suggest
from dynmo.planner.evaluate import PlanRequest
from tests.planner.test_make_plan import profile, replayed


def told(request: PlanRequest) -> str:
    with pytest.raises(InputError) as error:
        plan_or_suggest(request)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refused_plan_suggests_a_plan_that_fits() -> None:
    known = profile(12)
    heavy = replace(known.layers[0], f=4.0, b=4.0, w=4.0, weight_bytes=3000, activation_bytes=300)
    request = PlanRequest(
        replace(known, layers=(heavy, *known.layers[1:])), 3, 6, "1f1b", balancer="uniform"
    )
    plan = plan_or_suggest(request)
    most = max(plan.memory)
    line = told(replace(request, memory_limit=most - 1))
    assert line.startswith(
        f"rank {plan.memory.index(most)} (layers 0 to 3) needs {most} bytes under 1f1b with the "
        f"placement 4+4+4, over"
    )
    assert "; the balancer 'exact' would fit: " in line
    least = max(plan_or_suggest(PlanRequest(profile(12), 3, 6, "1f1b")).memory)
    assert "; the schedule zb-auto would fit: " in told(
        PlanRequest(profile(12), 3, 6, "1f1b", memory_limit=round(least * 0.95))
    )
    assert " ranks with " in told(
        PlanRequest(profile(12), 3, 6, "1f1b", memory_limit=round(least * 0.7))
    )
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
        (
            PlanRequest(replace(profile(), links=(), comm=(1.0, 2.0, 3.0)), 3, 6),
            "comm has 3 numbers",
        ),
    ],
)
def test_bad_input_is_refused_without_a_suggestion(wanted: PlanRequest, message: str) -> None:
    assert message in told(wanted)
    assert message in told(replace(wanted, memory_limit=10**9))
