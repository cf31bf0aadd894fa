from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Kind, Op, Schedule
from dynmo.schedule.simulator import Timeline, peak_memory, resident, simulate
from tests.schedule.samples import from_text, schedules, whole_costs, with_time

F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def ends(timeline: Timeline) -> dict[Op, float]:
    return {span.op: span.end for row in timeline.ranks for span in row}


def test_timeline_matches_a_hand_computed_example() -> None:
    # 0 |F0 F1 ............B0    ...B1    W0 W1 ...|   F 1, B 2, W 1
    # 1 |......F0    B0 F1    B1 W0       W1       |   F 2, B 1, W 3; the link takes 1
    schedule = from_text(
        "# x  ranks=2 microbatches=2 placement=0,1\n0 | F0 F1 B0 B1 W0 W1\n1 | F0 B0 F1 B1 W0 W1\n"
    )
    timeline = simulate(schedule, Costs((StageCost(1, 2, 1), StageCost(2, 1, 3)), (1,)))
    starts = [[span.start for span in row] for row in timeline.ranks]
    assert starts == [[0, 1, 6, 9, 11, 12], [2, 4, 5, 7, 8, 11]]
    ends_of = [[span.end for span in row] for row in timeline.ranks]
    assert ends_of == [[1, 2, 8, 11, 12, 13], [4, 5, 7, 8, 11, 14]]
    assert [span.op for span in timeline.ranks[1]] == list(schedule.ops[1])
    assert timeline.busy == (8, 12)
    assert timeline.span == 13
    assert timeline.makespan == 14
    assert timeline.bubble_ratio == 1 - 12 / 13
    assert timeline.makespan_bubble_ratio == 1 - 12 / 14
    assert timeline.idle_ratio == 1 - 10 / 13


def test_a_frozen_prefix_waits_for_its_credits() -> None:
    schedule = replace(make("1f1b", 2, 4, first_trainable=1), credits=2)
    timeline = simulate(schedule, Costs((StageCost(1, 0, 0), StageCost(2, 2, 2)), (0,)))
    # F2 on rank 0 waits until F0 on rank 1 has ended at 3, F3 until F1 there has.
    assert [span.start for span in timeline.ranks[0]] == [0, 1, 3, 9]
    assert [span.start for span in timeline.ranks[1] if span.op.kind is F] == [1, 7, 13, 19]


@given(schedules(), st.data())
def test_every_op_starts_after_its_dependencies(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(whole_costs(schedule.stages))
    timeline = simulate(schedule, costs)
    end = ends(timeline)
    assert tuple(tuple(span.op for span in row) for row in timeline.ranks) == schedule.ops

    # Written out again, not taken from dependencies(): the definition in Zero Bubble, section 3.
    def arrives(op: Op, boundary: int) -> float:
        source, target = schedule.stage_ranks[boundary : boundary + 2]
        return end[op] + (costs.links[boundary] if source != target else 0)

    for row in timeline.ranks:
        free = 0.0
        for (kind, s, j), start, stop in row:
            backward = next((Op(k, s + 1, j) for k in (B, BW) if Op(k, s + 1, j) in end), None)
            needed = [free]
            if kind is F and s > 0:
                needed.append(arrives(Op(F, s - 1, j), s - 1))
            if kind is F and s < schedule.first_trainable and j >= schedule.ranks:
                needed.append(arrives(Op(F, s + 1, j - schedule.ranks), s))
            if kind in (B, BW):
                needed.append(end[Op(F, s, j)])
                if backward is not None:
                    needed.append(arrives(backward, s))
            if kind is W:
                needed.append(end[Op(B, s, j)])
            # At once, too: nothing waits longer than it has to.
            assert start == max(needed)
            stage = costs.stages[s]
            assert stop - start == {F: stage.f, B: stage.b, W: stage.w, BW: stage.b + stage.w}[kind]
            free = stop


@given(schedules(), st.data())
def test_busy_is_the_sum_of_the_costs(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(whole_costs(schedule.stages))
    timeline = simulate(schedule, costs)
    for rank, busy in enumerate(timeline.busy):
        each = (
            costs.stages[s].f
            + (costs.stages[s].b + costs.stages[s].w) * (s >= schedule.first_trainable)
            for s in schedule.stages_of(rank)
        )
        assert busy == schedule.microbatches * sum(each)
    assert max(timeline.busy) <= timeline.span <= timeline.makespan


@given(schedules(), st.data())
def test_higher_costs_never_end_an_op_earlier(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(whole_costs(schedule.stages))
    stages, links = list(costs.stages), list(costs.links)
    i, more = data.draw(st.integers(0, len(stages) - 1)), data.draw(st.integers(1, 9))
    field = data.draw(st.sampled_from(["f", "b", "w", "comm"] if links else ["f", "b", "w"]))
    if field == "comm":
        links[i % len(links)] += more
    else:
        stages[i] = replace(stages[i], **{field: getattr(stages[i], field) + more})
    before = ends(simulate(schedule, costs))
    after = ends(simulate(schedule, Costs(tuple(stages), tuple(links))))
    assert all(before[op] <= after[op] for op in before)


@given(schedules(), st.sampled_from([2, 4, 0.5]), st.data())
def test_times_scale_with_the_costs(schedule: Schedule, factor: float, data: st.DataObject) -> None:
    costs = data.draw(whole_costs(schedule.stages))
    stages = tuple(replace(s, f=s.f * factor, b=s.b * factor, w=s.w * factor) for s in costs.stages)
    scaled = simulate(schedule, Costs(stages, tuple(c * factor for c in costs.links)))
    timeline = simulate(schedule, costs)
    assert scaled.makespan == timeline.makespan * factor
    assert scaled.bubble_ratio == timeline.bubble_ratio
    assert scaled.peak_memory == timeline.peak_memory


def test_zero_costs_give_zero_ratios() -> None:
    timeline = simulate(make("zb-h1", 3, 4), uniform_costs(3, 0, 0, 0))
    assert timeline.span == timeline.bubble_ratio == 0
    assert timeline.makespan_bubble_ratio == timeline.idle_ratio == 0


def test_costs_for_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match="zb-h1 has 3 stages"):
        simulate(make("zb-h1", 3, 4), uniform_costs(2, 1, 1, 1))


def test_makespan_starts_with_the_first_op() -> None:
    schedule = make("gpipe", 2, 1)
    timeline = Timeline(schedule, ([5.0], [7.0]), ([6.0], [9.0]), (0.0, 0.0))
    assert (timeline.makespan, timeline.span) == (4, 2)


# Memory


def test_peak_memory_matches_a_hand_computation() -> None:
    schedule = from_text(
        "# x  ranks=1 microbatches=3 placement=0\n0 | F0 F1 B0 F2 W0 B1 W1 B2 W2\n"
    )
    # 10 20 | 14 24 | 20 14 10 4 0: an F adds 10, a B takes 6, a W takes 4.
    costs = Costs((StageCost(1, 1, 1, 10, -6, -4),), ())
    assert peak_memory(schedule, costs) == simulate(schedule, costs).peak_memory == (24,)
    assert resident(schedule) == (((2, 1),),)


@given(schedules(), st.data())
def test_peak_memory_matches_the_timeline(schedule: Schedule, data: st.DataObject) -> None:
    """Activations are held from the start of F to the end of B, stashes to the end of W."""
    costs = data.draw(whole_costs(schedule.stages).map(with_time))
    timeline = simulate(schedule, costs)
    for row, peak in zip(timeline.ranks, timeline.peak_memory, strict=True):
        at = {span.op: span for span in row}
        most = 0.0
        for now in (span.start for span in row):
            live = 0.0
            for kind, s, j in at:
                if kind is not F or s < schedule.first_trainable:
                    continue
                split = Op(B, s, j) in at
                backward, weights = (at[Op(k if split else BW, s, j)] for k in (B, W))
                if at[Op(F, s, j)].start <= now < backward.end:
                    live += costs.stages[s].mem_f
                elif backward.end <= now < weights.end:
                    live += -costs.stages[s].mem_w
            most = max(most, live)
        assert peak == most


@given(schedules(several=False), st.data())
def test_resident_pairs_give_the_peak_for_any_costs(
    schedule: Schedule, data: st.DataObject
) -> None:
    costs = data.draw(whole_costs(schedule.stages))
    expected = tuple(
        max(forward * stage.mem_f - stashed * stage.mem_w for forward, stashed in pairs)
        for stage, pairs in zip(costs.stages, resident(schedule), strict=True)
    )
    assert expected == peak_memory(schedule, costs)


@given(schedules())
def test_resident_pairs_are_not_dominated(schedule: Schedule) -> None:
    for stage, pairs in enumerate(resident(schedule)):
        assert not any(a[0] <= b[0] and a[1] <= b[1] for a, b in permutations(pairs, 2))
        if stage < schedule.first_trainable:
            assert pairs == ((0, 0),)
        else:
            assert pairs[0][0] >= 1


def test_resident_pairs_of_published_schedules() -> None:
    assert resident(make("1f1b", 3, 5)) == (((3, 0),), ((2, 0),), ((1, 0),))
    assert resident(make("gpipe", 2, 5)) == (((5, 0),), ((5, 0),))
    # H1 trades a microbatch in flight for one more W that waits, rank by rank.
    h1 = resident(make("zb-h1", 3, 5))
    assert h1 == (((3, 0), (2, 1)), ((2, 1), (1, 2)), ((1, 2), (0, 3)))
