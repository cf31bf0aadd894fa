from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.vshape import v_half, v_min, v_placement, zb_v
from dynmo.schedule.bounds import Objective
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.generators import make_schedule
from dynmo.schedule.lowering import lower
from dynmo.schedule.op import from_text, to_text, validate
from dynmo.schedule.simulator import simulate

GOLDEN = Path(__file__).parents[1] / "golden" / "chunks"
TABLE_5 = json.loads((Path(__file__).parents[2] / "facts" / "zero_bubble_table5.json").read_text())[
    "rows"
]

MAKERS = {"zb-v": zb_v, "v-half": v_half, "v-min": v_min}


def most(name: str, p: int) -> float:
    """The memory limit that the schedule promises, in activations of a whole rank."""
    return {"zb-v": p, "v-half": p / 2 + 1, "v-min": p / 3 + 1}[name]


def halves(p: int, f: float, b: float, w: float, comm: float = 0.0, w_memory: float = 0.5) -> Costs:
    """A rank's times and its one activation in two equal stages."""
    stage = StageCost(f / 2, b / 2, w / 2, 0.5, 0.5 * (w_memory - 1), -0.5 * w_memory)
    return Costs((stage,) * (2 * p), (comm,) * (2 * p - 1))


def of_row(row: dict) -> Costs:
    return halves(
        row["ranks"],
        *(row[key] for key in ("t_f_ms", "t_b_ms", "t_w_ms", "t_comm_ms", "w_memory_share")),
    )


@st.composite
def uneven(draw: st.DrawFn, ranks: int) -> Costs:
    """Times and memory of any size, zeros and B's that add to the memory among them."""
    times = st.one_of(st.just(0.0), st.floats(0.1, 3.0))
    stages: list[StageCost] = []
    for _ in range(2 * ranks):
        activation, stash = draw(st.floats(0.0, 2.0)), draw(st.floats(0.0, 2.0))
        stages.append(
            StageCost(draw(times), draw(times), draw(times), activation, stash - activation, -stash)
        )
    return Costs(tuple(stages), tuple(draw(times) for _ in range(2 * ranks - 1)))


def takes(costs: Costs, stage: int, first_trainable: int) -> float:
    """The most that one microbatch holds on the stage."""
    cost = costs.stages[stage]
    return max(cost.mem_f, cost.mem_f + cost.mem_b) if stage >= first_trainable else 0.0


@pytest.mark.parametrize(
    "path", sorted([*GOLDEN.glob("zb-v*.txt"), *GOLDEN.glob("v-*.txt")]), ids=lambda path: path.stem
)
def test_golden(path: Path) -> None:
    golden = from_text(path.read_text())
    validate(golden)
    costs = halves(golden.ranks, 2, 2, 2)
    assert (
        to_text(
            MAKERS[golden.name](costs, golden.microbatches, first_trainable=golden.first_trainable)
        )
        == path.read_text()
    )


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(MAKERS)),
    st.integers(1, 6),
    st.integers(1, 14),
    st.sampled_from(Objective),
    st.data(),
)
def test_always_valid_and_within_memory(
    name: str, p: int, m: int, objective: Objective, data: st.DataObject
) -> None:
    costs = data.draw(uneven(p))
    first_trainable = data.draw(st.one_of(st.just(0), st.integers(0, 2 * p - 1)))
    schedule = MAKERS[name](costs, m, first_trainable=first_trainable, objective=objective)
    validate(schedule)
    lower(schedule)
    assert from_text(to_text(schedule)) == schedule
    assert (schedule.name, schedule.placement, schedule.microbatches) == (name, v_placement(p), m)
    timeline = simulate(schedule, costs)
    for rank, peak in enumerate(timeline.peak_memory):
        assert (
            peak
            <= most(name, p)
            * sum(takes(costs, s, first_trainable) for s in (rank, 2 * p - 1 - rank))
            * (1 + 1e-9)
            + 1e-9
        )
    reached = timeline.span if objective is Objective.SPAN else timeline.makespan
    assert reached >= lower_bound_on(schedule.placement, costs, m, first_trainable, objective) * (
        1 - 1e-9
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_limits_of_ones_own(p: int, m: int, data: st.DataObject) -> None:
    # From one microbatch up, which every rank must be able to hold, any limits can be kept.
    costs = data.draw(uneven(p))
    caps = [
        data.draw(st.floats(1, p)) * (takes(costs, r, 0) + takes(costs, 2 * p - 1 - r, 0))
        for r in range(p)
    ]
    schedule = zb_v(costs, m, caps=caps)
    validate(schedule)
    assert all(
        peak <= cap * (1 + 1e-9) + 1e-9
        for peak, cap in zip(simulate(schedule, costs).peak_memory, caps, strict=True)
    )


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_no_bubble_on_equal_times(p: int) -> None:
    timeline = simulate(zb_v(halves(p, 2, 2, 2), 3 * p), halves(p, 2, 2, 2))
    assert timeline.span == 3 * p * 6
    assert max(timeline.peak_memory) == p


# The figures as they are printed, to 4 digits.
@pytest.mark.parametrize(("row", "published"), [(0, 0.0703), (3, 0.0403), (6, 0.0498), (9, 0.0531)])
def test_published_bubble_ratios(row: int, published: float) -> None:
    costs, p, m = of_row(TABLE_5[row]), TABLE_5[row]["ranks"], TABLE_5[row]["microbatches"]
    timeline = simulate(zb_v(costs, m), costs)
    assert round(timeline.bubble_ratio, 4) <= published
    assert max(timeline.peak_memory) <= p * (1 + 1e-9)


@pytest.mark.parametrize(
    ("row", "half", "least"), [(0, 0.20, 0.34), (3, 0.18, 0.28), (6, 0.20, 0.30), (9, 0.20, 0.31)]
)
def test_less_memory_for_more_bubble(row: int, half: float, least: float) -> None:
    costs, p, m = of_row(TABLE_5[row]), TABLE_5[row]["ranks"], TABLE_5[row]["microbatches"]
    timelines = [simulate(make(costs, m), costs) for make in (zb_v, v_half, v_min)]
    for timeline, name in zip(timelines, MAKERS, strict=True):
        assert max(timeline.peak_memory) <= most(name, p) * (1 + 1e-9)
    full, middle, small = (timeline.bubble_ratio for timeline in timelines)
    assert full < middle < small
    # With about half of its memory V-Half still beats 1F1B. V-Min does so if F = B = W. Here F + B
    # are over two thirds of the work.
    assert middle < half < TABLE_5[row]["bubble"]["1f1b"]
    assert small < least


def test_less_memory_than_1f1b_and_less_bubble_on_equal_times() -> None:
    for make, bubble in ((v_half, 0.13), (v_min, 0.16)):
        timeline = simulate(make(halves(8, 2, 2, 2), 24), halves(8, 2, 2, 2))
        assert timeline.bubble_ratio < bubble < 7 / 31  # 1F1B's (p - 1) / (m + p - 1)


def test_uneven_costs_shape_the_schedule() -> None:
    # One slow stage: what is made for its true costs is no longer than what is made for their mean.
    costs = halves(4, 2, 2, 2, 0.1)
    slow = Costs(
        (*costs.stages[:3], StageCost(1.6, 1.6, 1.6, 0.5, -0.25, -0.25), *costs.stages[4:]),
        costs.links,
    )
    for make in (zb_v, v_half, v_min):
        assert simulate(make(slow, 12), slow).span <= simulate(make(costs, 12), slow).span * (
            1 + 1e-9
        )


def test_memory_in_whole_numbers() -> None:
    whole = Costs((StageCost(1, 1, 1, 2, -1, -1),) * 4, (0, 0, 0))
    assert zb_v(whole, 4) == zb_v(halves(2, 2, 2, 2), 4)


def test_the_same_every_time() -> None:
    costs = of_row(TABLE_5[3])
    assert v_half(costs, 24) == v_half(costs, 24)


def test_a_frozen_prefix_is_short_and_holds_nothing() -> None:
    costs = halves(4, 2, 2, 2)
    for make in (zb_v, v_half, v_min):
        timeline = simulate(make(costs, 12, first_trainable=5), costs)
        assert timeline.peak_memory[3] == 0  # both its stages, 3 and 4, are frozen
        assert timeline.span < simulate(make(costs, 12), costs).span


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        (halves(2, 1, 1, 1), {"microbatches": 0}, "zb-v: 0 microbatches; at least 1 is needed"),
        (
            Costs(halves(2, 1, 1, 1).stages[:3], (0.0, 0.0)),
            {},
            "zb-v has 2 stages a rank, but costs are given for 3",
        ),
        (Costs((), ()), {}, "zb-v has 2 stages a rank, but costs are given for 0"),
        (
            halves(2, 1, 1, 1),
            {"first_trainable": 4},
            "first trainable stage 4 of 4 stages; at least the last stage must train",
        ),
        (halves(2, 1, 1, 1), {"caps": [1]}, "1 memory limits for 2 ranks"),
        (
            halves(2, 1, 1, 1),
            {"caps": [1, 0.9]},
            "limit of rank 1 is 0.9, but one microbatch of its stages 1 and 2 takes 1; give it",
        ),
        (halves(2, 1, 1, 1), {"caps": [float("nan"), 1]}, "limit of rank 0 is nan"),
        (
            halves(2, 1e300, 1, 1),
            {},
            "zb-v: the times are so large that their sum is no time any more; choose a larger unit",
        ),
        (halves(2, 1e308, 1e308, 1e308), {}, "zb-v: the times are so large"),
    ],
)
def test_what_cannot_be_made(costs: Costs, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        zb_v(costs, **{"microbatches": 4, **options})
    assert message in str(caught.value)


def test_1f1b_holds_as_much_as_zb_v() -> None:
    timeline = simulate(make_schedule("1f1b", 4, 12), Costs((StageCost(2, 2, 2),) * 4, (0.0,) * 3))
    assert (
        max(timeline.peak_memory)
        == max(simulate(zb_v(halves(4, 2, 2, 2), 12), halves(4, 2, 2, 2)).peak_memory)
        == 4
    )
    assert timeline.span > 12 * 6
