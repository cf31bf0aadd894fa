from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.exact import PROVEN, Exact, exact
from dynmo.schedule.automatic.zero_bubble import automatic
from dynmo.schedule.bounds import Objective, lower_bound
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Kind, Op, Schedule, dependencies, validate
from dynmo.schedule.simulator import peak_memory, simulate
from tests.combinations import mostly_matrix
from tests.schedule.samples import (
    TABLE_5,
    apart,
    fits,
    schedules,
    times_of,
    wander,
    whole_costs,
)

few = settings(max_examples=settings().max_examples // 5)


def length(schedule: Schedule, costs: Costs, objective: Objective = Objective.SPAN) -> float:
    return simulate(schedule, costs).length(objective)


def published(model: str, ranks: int) -> Costs:
    return uniform_costs(ranks, *times_of(next(row for row in TABLE_5 if row["model"] == model)))


def solved(
    costs: Costs,
    m: int,
    *,
    start: Schedule | None = None,
    caps: Sequence[float] | None = None,
    first_trainable: int = 0,
    objective: Objective = Objective.SPAN,
    **limits: Any,
) -> Exact:
    """The solver goes on from zb-auto's schedule if no other is given."""
    start = start or automatic(
        costs, m, caps=caps, first_trainable=first_trainable, objective=objective
    )
    return exact(start, costs, caps=caps, objective=objective, **limits)


@contextmanager
def solver_alone() -> Iterator[None]:
    """Within, the solver proves everything by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dynmo.schedule.automatic.exact.lower_bound", lambda *_: 0.0)
        yield


# -- every order there is --------------------------------------------------------------------------


def orders(ops: Sequence[Op], frame: Schedule) -> Iterator[tuple[Op, ...]]:
    """Every order of one rank's ops that no other rank has to be looked at to accept."""
    if not ops:
        yield ()
        return
    left = set(ops)
    for op in ops:
        earlier = op.microbatch and op._replace(microbatch=op.microbatch - 1) in left
        if not earlier and not any(d.op in left for d in dependencies(frame, op)):
            for rest in orders([other for other in ops if other != op], frame):
                yield (op, *rest)


def shortest(
    frame: Schedule, costs: Costs, caps: Sequence[float], objective: Objective
) -> float | None:
    """The least length of all schedules with these ops that fit. None if none does."""
    fitting = (
        [
            row
            for row in orders(own, frame)
            if peak_memory(replace(frame, ops=(row,)), costs)[0] <= cap * (1 + 1e-9)
        ]
        for own, cap in zip(frame.ops, caps, strict=True)
    )
    lengths: list[float] = []
    for rows in product(*fitting):
        tried = replace(frame, ops=rows)
        try:
            lengths.append(length(tried, costs, objective))
        except ScheduleError:  # the ranks wait for each other
            continue
    return min(lengths, default=None)


def hold(costs: Costs, data: st.DataObject) -> list[float]:
    """Caps between one microbatch and three."""
    return [data.draw(st.floats(1, 3)) * c.mem_f for c in costs.stages]


@pytest.mark.parametrize(
    ("p", "m"), mostly_matrix([(1, 3), (2, 2), (2, 3), (3, 2)], everyday=[(2, 2), (3, 2)])
)
@few
@given(data=st.data())
def test_result_equals_the_best_of_all_orders(p: int, m: int, data: st.DataObject) -> None:
    costs, first_trainable = data.draw(whole_costs(p)), data.draw(st.sampled_from([0, 0, p - 1]))
    caps, objective = hold(costs, data), data.draw(st.sampled_from(Objective))
    given = {"caps": caps, "first_trainable": first_trainable, "objective": objective}
    with nullcontext() if data.draw(st.booleans()) else solver_alone():
        result = solved(costs, m, seconds=60, workers=1, **given)
    validate(result.schedule)
    least = shortest(result.schedule, costs, caps, objective)
    assert result.proven
    assert result.bound == length(result.schedule, costs, objective) == least


@pytest.mark.parametrize(
    ("seed", "m", "objective"),
    mostly_matrix(
        product(range(4), (1, 2), Objective),
        everyday=[(1, 2, Objective.MAKESPAN), (3, 2, Objective.SPAN)],
    ),
)
def test_result_is_optimal_if_a_rank_holds_two_stages(
    seed: int, m: int, objective: Objective
) -> None:
    random = Random(seed)
    stages = (
        StageCost(random.randint(1, 9), random.randint(1, 9), random.randint(0, 9), 3, -2, -1)
        for _ in range(3)
    )
    costs = Costs(tuple(stages), (random.randint(0, 3), random.randint(0, 3)))
    start = apart(wander((0, 1, 0), m, seed % 2, random))
    caps = list(peak_memory(start, costs))
    given = {"caps": caps, "first_trainable": seed % 2, "objective": objective, "start": start}
    result = solved(costs, m, seconds=60, workers=1, **given)
    assert result.proven
    least = shortest(start, costs, caps, objective)
    assert result.bound == length(result.schedule, costs, objective) == least


def test_result_is_optimal_if_b_adds_memory() -> None:
    # W of a lone linear layer needs its input and its output's gradient. That is more than F left
    # behind.
    costs = Costs((StageCost(2, 1, 1, 1, 1, -2), StageCost(1, 3, 2, 2, -1, -1)), (0.5,))
    for caps in ([2, 2], [3, 4], [4, 2], [5, 6]):
        result = solved(costs, 3, caps=caps, workers=1, seconds=60)
        least = shortest(result.schedule, costs, caps, Objective.SPAN)
        assert result.bound == length(result.schedule, costs) == least
    with pytest.raises(ScheduleError, match="stage 0"):
        solved(costs, 3, caps=[1.5, 9])


# -- what always holds -----------------------------------------------------------------------------


@few
@given(schedules(), st.sampled_from(Objective), st.floats(1, 1.5), st.data())
def test_result_is_no_worse_than_the_start_and_within_caps(
    start: Schedule, objective: Objective, room: float, data: st.DataObject
) -> None:
    costs = data.draw(whole_costs(start.stages))
    caps = [room * peak for peak in peak_memory(start, costs)]
    given_ = {"caps": caps, "first_trainable": start.first_trainable, "objective": objective}
    result = solved(costs, start.microbatches, start=start, seconds=0.3, workers=1, **given_)
    validate(result.schedule)
    assert (result.schedule.name, result.schedule.stage_ranks) == (start.name, start.stage_ranks)
    assert (
        result.bound <= length(result.schedule, costs, objective) <= length(start, costs, objective)
    )
    assert fits(result.schedule, costs, caps)


@few
@given(st.integers(2, 4), st.integers(1, 5), st.data())
def test_bound_holds_for_times_without_a_common_unit(p: int, m: int, data: st.DataObject) -> None:
    # 30 binary digits: the solver's ticks are coarser, and sums of floats are exact.
    times = st.integers(2**24, 2**30).map(lambda digits: digits / 2**30)
    costs = Costs(
        tuple(StageCost(data.draw(times), data.draw(times), data.draw(times)) for _ in range(p)),
        (data.draw(times),) * (p - 1),
    )
    result = solved(costs, m, caps=[p] * p, workers=1)
    tried = [
        make("zb-h1", p, m),
        make("1f1b", p, m),
        wander(range(p), m, 0, data.draw(st.randoms(use_true_random=False))),
    ]
    assert result.proven
    assert result.bound <= length(result.schedule, costs) <= result.bound * (1 + PROVEN)
    assert all(
        result.bound <= length(schedule, costs)
        for schedule in tried
        if max(peak_memory(schedule, costs)) <= p
    )


# -- the figures of the contract -------------------------------------------------------------------

# Lengths of the best schedule for equal times, for the 1.5B model and for the 6.2B model.
BEST = {
    (3, 4, 1): {"equal": 14, "1.5B": 243.13, "6.2B": 399.042},
    (4, 6, 1): {"equal": 21, "1.5B": 364.695, "6.2B": 598.563},
    (4, 8, 2): {"equal": 24, "1.5B": 415.631, "6.2B": 673.871},
}


@pytest.mark.parametrize("alone", mostly_matrix([False, True], everyday=[False]))
@pytest.mark.parametrize("model", mostly_matrix(["equal", "1.5B", "6.2B"], ["equal", "1.5B"]))
@pytest.mark.parametrize(("p", "m", "k"), BEST)
def test_optimum_is_proven(p: int, m: int, k: int, model: str, alone: bool) -> None:
    """In under five seconds on a quiet machine."""
    costs = uniform_costs(p, 1, 1, 1) if model == "equal" else published(model, p)
    caps = [k * p] * p
    with solver_alone() if alone else nullcontext():
        result = solved(costs, m, caps=caps, seconds=5 if alone else 60)
    assert result.proven
    best = pytest.approx(BEST[p, m, k][model], rel=1e-9)
    assert result.bound == pytest.approx(length(result.schedule, costs), rel=1e-9)
    assert result.bound == best
    assert fits(result.schedule, costs, caps)
    bound = lower_bound(costs, m, 0, Objective.SPAN, caps)
    assert 0.99 * result.bound <= bound <= result.bound * (1 + 1e-9)


def test_bound_for_few_microbatches_matches_the_formula() -> None:
    for m in (2, 3, 4):
        assert solved(uniform_costs(4, 3, 4, 2), m, caps=[4] * 4).bound == (m + 4 - 1) * (3 + 4) + 2


def test_search_improves_a_start_and_keeps_its_name() -> None:
    costs = published("1.5B", 4)
    result = solved(costs, 8, caps=[8] * 4, start=make("zb-h2", 4, 8))
    assert result.schedule.name == "zb-h2"
    assert length(result.schedule, costs) < 0.98 * length(make("zb-h2", 4, 8), costs)
    # A start that cannot be improved comes back as it is, though its backward is one op.
    tight = solved(uniform_costs(3, 1, 1, 0), 3, caps=[3] * 3, start=make("1f1b", 3, 3))
    assert tight.proven
    assert str(tight.schedule) == str(make("1f1b", 3, 3))


def test_search_without_proof_ends_in_time() -> None:
    costs, start = published("6.2B", 8), make("zb-h2", 8, 24)  # it takes many seconds to prove
    result = solved(costs, 24, caps=[16] * 8, start=start, seconds=0.1)
    assert not result.proven
    assert result.bound < length(result.schedule, costs) <= length(start, costs)


def test_large_case_returns_the_start_without_a_search() -> None:
    costs = published("1.5B", 32)
    result = solved(costs, 128, start=make("zb-h1", 32, 128), seconds=600)
    assert (result.schedule, result.proven) == (make("zb-h1", 32, 128), False)
    assert result.bound == lower_bound(costs, 128)
    assert solved(uniform_costs(2, 0, 0, 0), 3).bound == 0


# -- bad input -------------------------------------------------------------------------------------


def test_cap_below_one_microbatch_is_refused() -> None:
    with pytest.raises(ScheduleError) as error:
        solved(uniform_costs(4, 1, 1, 1), 4, caps=[4, 4, 0.9, 4])
    assert "stage 2" in str(error.value)
    assert "\n" not in str(error.value)
    # A frozen stage holds nothing, so it needs no room.
    assert solved(uniform_costs(4, 1, 1, 1), 4, caps=[0, 0, 4, 4], first_trainable=2).proven


def test_caps_of_one_microbatch_can_be_met() -> None:
    costs = uniform_costs(3, 1, 1, 1)
    result = solved(costs, 3, caps=[1] * 3)
    assert peak_memory(result.schedule, costs) == (1, 1, 1)
    assert result.proven


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"start": make("zb-h1", 3, 6)}, "3 stages"),
        (
            {"start": Schedule("back", 6, (0, 0, 1, 1), wander((0, 0, 1, 1), 6, 0, Random(1)).ops)},
            "(0, 0, 1, 1)",
        ),
    ],
)
def test_bad_input_is_refused(given: dict, message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        solved(uniform_costs(4, 1, 1, 1), 6, **given)
    assert message in str(error.value)


def test_missing_solver_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(ScheduleError, match="pip install ortools"):
        solved(published("1.5B", 4), 8, caps=[8] * 4, start=make("zb-h2", 4, 8))


def test_warm_up_holds_no_more_microbatches_than_needed() -> None:
    """More microbatches would not bring the first B any earlier."""
    result = solved(uniform_costs(2, 1, 1, 1), 3, caps=[2, 2], workers=1)
    assert [op.kind for op in result.schedule.ops[0][:2]] == [Kind.F, Kind.F]
    assert result.bound == lower_bound(uniform_costs(2, 1, 1, 1), 3) + 1
