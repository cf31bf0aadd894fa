"""Alternatives of a plan, and what would fit the memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from dynmo.cost.costs_file import Profile
from dynmo.cost.layer_cost import LayerCost, LinkCost
from dynmo.errors import InputError, NoRoomError, PartitionError, ScheduleError
from dynmo.plan.alternatives import (
    Alternative,
    Trial,
    alternatives,
    choose_schedule,
    plan_or_suggest,
    rank_table,
)
from dynmo.plan.evaluate import Plan
from dynmo.plan.problem import Allowed, Problem
from dynmo.schedule.catalogue import AUTO, SCHEDULES, shapes_of
from tests.plan.asked import Asked, ask, made
from tests.plan.test_decide import FROZEN, ONE
from tests.plan.test_evaluate import profile, replayed


def test_alternatives_of_a_plan() -> None:
    asked = ask(profile(12), 3, 6)
    found = alternatives(plan_or_suggest(*asked), asked[2])
    choices = {kind: {other.choice for other in others} for kind, others in found.items()}
    # Microbatches have 4 sequences. 24 sequences fit in 12 of 2, or 24 of 1, or 3 of 8, but not in
    # 1.5.
    assert choices == {
        "balancers": {"uniform", "diffusion"},
        "schedules": set(SCHEDULES) - {"zb-h1"},
        "ranks": {1, 2, 4, 5, 6},
        "microbatches": {3, 12, 24},
    }
    for others in found.values():
        assert all((x.plan is None) == (x.problem is not None) for x in others)
        plans = [x.plan for x in others if x.plan is not None]
        assert [plan.step for plan in plans] == sorted(plan.step for plan in plans)
        for plan in plans:
            replayed(plan)


def test_an_interruption_drops_the_trials_that_have_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, begun = ask(profile(12), 3, 6), list[Trial]()
    plan = plan_or_suggest(*asked)

    def attempt(trial: Trial, quick: bool = False) -> Alternative:
        begun.append(trial)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.05)
        return Alternative(trial[0], None)

    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("dynmo.plan.alternatives._attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        alternatives(plan, asked[2])
    assert len(begun) < 10, "of 19"


def test_smaller_microbatches_scale_time_and_activations() -> None:
    asked = ask(profile(12), 3, 6)
    others = alternatives(plan_or_suggest(*asked), asked[2])["microbatches"]
    plan = {x.choice: x.plan for x in others}[12]
    assert plan is not None
    for small, whole in zip(plan.layers, profile(12).layers, strict=True):
        assert (small.f, small.static_bytes) == (whole.f / 2, whole.static_bytes)
        assert small.activation_bytes == -(-whole.activation_bytes // 2)


def told(asked: Asked, **known: Any) -> str:
    problem, mesh, allowed = asked
    with pytest.raises(InputError) as error:
        plan_or_suggest(replace(problem, **known), mesh, allowed)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_refused_plan_suggests_a_plan_that_fits() -> None:
    usual = ask(profile(12), 3, 6, "1f1b")
    first, *rest = usual[0].layers
    heavy = replace(first, f=4.0, b=4.0, w=4.0, weight_bytes=3000, activation_bytes=300)
    known = replace(usual[0].profile, layers=(heavy, *rest))
    even = ask(known, 3, 6, "1f1b", balancer="uniform")
    plan = plan_or_suggest(*even)
    most = max(plan.memory)
    line = told(even, memory_limit=most - 1)
    assert line.startswith(
        f"rank {plan.memory.index(most)} (layers 0 to 3) needs {most} bytes under 1f1b with the "
        f"placement 4+4+4, over"
    )
    assert "; the balancer 'exact' would fit: " in line
    least = max(plan_or_suggest(*usual).memory)
    for share, says in ((0.95, "; the schedule zb-auto would fit: "), (0.7, " ranks with ")):
        assert says in told(usual, memory_limit=round(least * share))
    assert "; nothing that was tried fits" in told(even, memory_limit=1000)


def test_suggested_plan_fits() -> None:
    for seed in range(4):
        known = profile(12, seed)
        limit = round(max(made(known, 3, 6).memory) * 0.97)
        try:
            replayed(plan_or_suggest(*ask(known, 3, 6, memory_limit=limit)))
        except PartitionError as error:
            name = str(error).split("the schedule ")[1].split(" would")[0]
            replayed(made(known, 3, 6, name, memory_limit=limit))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (ask(profile(), 3, 6, "zb-h3"), "unknown schedule 'zb-h3'"),
        (ask(profile(), 3, 6, balancer="best"), "unknown balancer 'best'"),
        (
            ask(profile(), 3, 7, "interleaved-1f1b"),
            "7 microbatches are not a multiple of 3 ranks",
        ),
        (ask(profile(), 3, 6, "zb-h1", chunks=2), "zb-h1 has 1 stage a rank, not 2"),
        (ask(profile(), 13, 6), "13 ranks need at least 13 layers"),
    ],
)
def test_bad_input_is_refused_without_a_suggestion(wanted: Asked, message: str) -> None:
    assert message in told(wanted)
    assert message in told(wanted, memory_limit=10**9)


# -- what "auto" stands for ------------------------------------------------------------------------

EVEN = (ONE,) * 8
# Two ranks cannot share 3 + 2 + 2 + 1 evenly in order. A V can: 3 + 1 and 2 + 2.
UNEVEN = tuple(
    LayerCost(0.01 * n, 0.01 * n, 0.01 * n, 10, 100, 100, 200, 5, 2, 10) for n in (3, 2, 2, 1)
)


def chosen(layers: tuple[LayerCost, ...] = UNEVEN, ranks: int = 2, **known: Any) -> Plan:
    profile = Profile(layers, tuple(map(str, range(len(layers)))), microbatch=1)
    return choose_schedule(*ask(profile, ranks, 9, AUTO, **known))[0]


def test_uneven_layers_get_a_v_and_even_ones_one_stage() -> None:
    profile = Profile(UNEVEN, tuple("abcd"), microbatch=1)
    plan, tried = choose_schedule(*ask(profile, 2, 9, AUTO))
    assert [each.choice for each in tried] == ["zb-auto", "v-auto"], "9 is no multiple of 2"
    assert plan.mesh.schedule == "v-auto"
    one, v = (each.plan for each in tried)
    assert one is not None
    assert v is plan
    assert plan.step < one.step == made(profile, 2, 9, "zb-auto").step
    assert chosen(EVEN).mesh.schedule == "zb-auto"
    assert chosen(ranks=1).mesh.schedule == "zb-auto"
    half_frozen = (FROZEN,) * 6 + (ONE,) * 6
    assert chosen(half_frozen, ranks=4).mesh.schedule == "v-auto"


def test_a_slow_link_brings_the_fewest_messages() -> None:
    slow = Profile(UNEVEN, tuple("abcd"), comm=0.2)
    assert choose_schedule(*ask(slow, 2, 9, AUTO))[0].mesh.schedule == "zb-auto"


def test_memory_chooses_a_schedule_that_fits() -> None:
    limit = max(made(Profile(UNEVEN, tuple("abcd"), microbatch=1), 2, 9, "v-auto").memory) - 1
    assert max(chosen(memory_limit=limit).memory) <= limit
    with pytest.raises(
        PartitionError, match=r"^auto: no schedule fits; zb-\w+ comes closest: rank"
    ):
        chosen(memory_limit=100)


def test_impossible_schedules_are_refused_in_one_line() -> None:
    with pytest.raises(PartitionError, match="5 ranks need at least 5 layers; the model has 4"):
        chosen(ranks=5)
    with pytest.raises(ScheduleError, match="auto chooses the stages of a rank itself"):
        chosen(chunks=2)
    assert shapes_of(AUTO, 4, 8, 7) == ("zb-auto",)
    assert shapes_of("1f1b", 4, 8, 7) == ("1f1b",)


# -- every number of ranks -------------------------------------------------------------------------


def test_table_has_a_row_for_every_number_of_ranks() -> None:
    layers = (LayerCost(1.0, 1.0, 1.0, 1, 10, 10, 20),) * 8
    links = (((0, 1), LinkCost(0.0, 100.0)),)
    profile = Profile(layers, tuple("abcdefgh"), links=links, microbatch=1)
    problem = Problem(profile, memory_limit=200, bandwidth=100.0)
    allowed = Allowed(6, 8, (1,), ("zb-h1",))
    table = rank_table(problem, allowed, 0.5, retune=True)
    assert [row.ranks for row in table.rows] == [1, 2, 3, 4, 5, 6]
    assert [row.ranks for row in table.rows if row.plan is None] == [1]
    reason = table.rows[0].problem
    assert reason is not None
    assert "over the limit of 200" in reason
    plans = [row.plan for row in table.rows if row.plan is not None]
    assert plans[-1].seconds == table.full_seconds
    assert table.limit_seconds == 1.5 * table.full_seconds
    assert min(x.mesh.gpus for x in plans if x.seconds <= table.limit_seconds) == table.fewest
    assert all(plan.mesh.micro_batch == 1 for plan in plans)
    for row in table.rows[1:]:
        assert row.plan is not None
        assert row.retuned is not None
        assert row.retuned.seconds <= row.plan.seconds
        assert row.retuned.mesh.global_batch == 8
    assert all(row.retuned is None for row in rank_table(problem, allowed, 0.5).rows)
    with pytest.raises(NoRoomError):
        rank_table(replace(problem, memory_limit=50), allowed, 0.5)
    with pytest.raises(PartitionError, match="12 ranks have no mesh"):
        rank_table(problem, replace(allowed, gpus=12, replicas=(1,)), 0.5)
