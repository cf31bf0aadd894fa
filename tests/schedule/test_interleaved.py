from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import make_by_hand
from dynmo.schedule.interleaved import interleaved, loop_stage_ranks
from dynmo.schedule.lowering import lower
from dynmo.schedule.op import (
    Kind,
    Op,
    Schedule,
    dependencies,
    from_text,
    in_order,
    to_text,
    validate,
)
from dynmo.schedule.simulator import peak_memory, simulate
from tests.schedule.samples import PUBLISHED, times_of

# The published runs give every rank as many layers as it takes to reach 24, 32, 48 and 64, and
# interleave single layers.
LAYERS = {"1.5B": 24, "6.2B": 32, "14.6B": 48, "28.3B": 64}

times = st.integers(1, 50)


def published_span(schedule: Schedule, costs: Costs) -> float:
    """As the table's authors count: only a group's first message is waited for at a wrap."""
    p = schedule.ranks
    ended: dict[Op, float] = {}
    free, began = [0.0] * p, [-1.0] * p
    for rank, op, _ in in_order(schedule):
        start = free[rank]
        for before, boundary in dependencies(schedule, op):
            if boundary is None:
                start = max(start, ended[before])
            elif (boundary + 1) % p or op.microbatch % p == 0:
                start = max(start, ended[before] + costs.links[boundary])
        began[rank] = start if began[rank] < 0 else began[rank]
        stage = costs.stages[op.stage]
        took = stage.f if op.kind is Kind.F else stage.b + stage.w
        free[rank] = ended[op] = start + took
    return max(end - start for end, start in zip(free, began, strict=True))


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.data())
def test_any_schedule_is_valid(p: int, groups: int, v: int, data: st.DataObject) -> None:
    first_trainable = data.draw(st.integers(0, p * v - 1))
    schedule = interleaved(p, p * groups, v, first_trainable)
    validate(schedule)
    lower(schedule)
    assert schedule.stage_ranks == loop_stage_ranks(p, v)
    assert from_text(to_text(schedule)) == schedule
    assert {op.kind for row in schedule.ops for op in row} == {Kind.F, Kind.BW}


@given(st.integers(1, 6), st.integers(1, 4))
def test_one_chunk_is_1f1b(p: int, groups: int) -> None:
    assert interleaved(p, p * groups, 1).ops == make_by_hand("1f1b", p, p * groups).ops


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), times, times, times)
def test_the_bubble_is_that_of_1f1b_divided_by_the_chunks(
    p: int, groups: int, v: int, f: int, b: int, w: int
) -> None:
    m = p * groups
    timeline = simulate(interleaved(p, m, v), uniform_costs(p * v, f, b, w))
    assert timeline.span == timeline.makespan == (m * v + p - 1) * (f + b + w)


@given(st.integers(1, 6), st.integers(2, 4), st.integers(2, 4))
def test_peak_activations_match_the_formula(p: int, groups: int, v: int) -> None:
    peaks = peak_memory(interleaved(p, p * groups, v), uniform_costs(p * v, 1, 1, 1))
    assert peaks == tuple((v + 1) * p - 1 - 2 * rank for rank in range(p))


@pytest.mark.parametrize("row", PUBLISHED)
def test_published_bubble_ratios(row: dict) -> None:
    p, m = row["ranks"], row["microbatches"]
    f, b, w, comm, _ = times_of(row)
    v = LAYERS[row["model"]] // p
    schedule, costs = interleaved(p, m, v), uniform_costs(p * v, f / v, b / v, w / v, comm)
    bubble = 1 - m * (f + b + w) / published_span(schedule, costs)
    assert round(bubble, 4) == row["bubble"]["interleaved-1f1b"]
    # The schedule takes 2 v p - 2 links if every message pays its link. The table leaves p out.
    assert simulate(schedule, costs).span == pytest.approx(
        m * (f + b + w) + (p - 1) * (f + b + w) / v + (2 * v * p - 2) * comm
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4, 2), "0 ranks"),
        ((2, 0, 2), "0 microbatches"),
        ((2, 4, 2, 4), "first trainable stage 4 of 4 stages"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        interleaved(*arguments)
