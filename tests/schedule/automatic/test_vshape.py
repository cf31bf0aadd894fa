from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.vshape import v_shape
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import v_stage_ranks
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.lowering import lower
from dynmo.schedule.op import from_text, to_text, validate
from dynmo.schedule.simulator import simulate
from tests.schedule.samples import TABLE_5

GOLDEN = Path(__file__).parents[1] / "golden" / "chunks"

NAMES = ("zb-v", "v-half", "v-min")


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
def test_schedule_equals_the_golden_file(path: Path) -> None:
    golden = from_text(path.read_text())
    validate(golden)
    costs = halves(golden.ranks, 2, 2, 2)
    assert (
        to_text(
            v_shape(golden.name, costs, golden.microbatches, first_trainable=golden.first_trainable)
        )
        == path.read_text()
    )


@given(
    st.sampled_from(NAMES),
    st.integers(1, 6),
    st.integers(1, 14),
    st.sampled_from(Objective),
    st.data(),
)
def test_any_schedule_is_valid_and_within_memory(
    name: str, p: int, m: int, objective: Objective, data: st.DataObject
) -> None:
    costs = data.draw(uneven(p))
    first_trainable = data.draw(st.one_of(st.just(0), st.integers(0, 2 * p - 1)))
    schedule = v_shape(name, costs, m, first_trainable=first_trainable, objective=objective)
    validate(schedule)
    lower(schedule)
    assert from_text(to_text(schedule)) == schedule
    assert (schedule.name, schedule.stage_ranks, schedule.microbatches) == (
        name,
        v_stage_ranks(p),
        m,
    )
    timeline = simulate(schedule, costs)
    for rank, peak in enumerate(timeline.peak_memory):
        assert (
            peak
            <= most(name, p)
            * sum(takes(costs, s, first_trainable) for s in (rank, 2 * p - 1 - rank))
            * (1 + 1e-9)
            + 1e-9
        )
    assert timeline.length(objective) >= lower_bound_on(
        schedule.stage_ranks, costs, m, first_trainable, objective
    ) * (1 - 1e-9)


@settings(max_examples=20)
@given(st.integers(1, 5), st.integers(1, 12), st.data())
def test_custom_memory_caps_are_kept(p: int, m: int, data: st.DataObject) -> None:
    # From one microbatch up, which every rank must be able to hold, any limits can be kept.
    costs = data.draw(uneven(p))
    caps = [
        data.draw(st.floats(1, p)) * (takes(costs, r, 0) + takes(costs, 2 * p - 1 - r, 0))
        for r in range(p)
    ]
    schedule = v_shape("zb-v", costs, m, caps=caps)
    validate(schedule)
    assert all(
        peak <= cap * (1 + 1e-9) + 1e-9
        for peak, cap in zip(simulate(schedule, costs).peak_memory, caps, strict=True)
    )


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_zb_v_has_no_bubble_on_equal_times(p: int) -> None:
    timeline = simulate(v_shape("zb-v", halves(p, 2, 2, 2), 3 * p), halves(p, 2, 2, 2))
    assert timeline.span == 3 * p * 6
    assert max(timeline.peak_memory) == p


# The figures as they are printed, to 4 digits.
@pytest.mark.parametrize(
    ("row", "published"),
    [
        (0, 0.0703),
        (3, 0.0403),
        pytest.param(6, 0.0498, marks=pytest.mark.matrix),
        pytest.param(9, 0.0531, marks=pytest.mark.matrix),
    ],
)
def test_published_bubble_ratios(row: int, published: float) -> None:
    costs, p, m = of_row(TABLE_5[row]), TABLE_5[row]["ranks"], TABLE_5[row]["microbatches"]
    timeline = simulate(v_shape("zb-v", costs, m), costs)
    assert round(timeline.bubble_ratio, 4) <= published
    assert max(timeline.peak_memory) <= p * (1 + 1e-9)


@pytest.mark.parametrize(
    ("row", "half", "least"),
    [
        (0, 0.20, 0.34),
        (3, 0.18, 0.28),
        pytest.param(6, 0.20, 0.30, marks=pytest.mark.matrix),
        pytest.param(9, 0.20, 0.31, marks=pytest.mark.matrix),
    ],
)
def test_v_half_and_v_min_trade_memory_for_bubble(row: int, half: float, least: float) -> None:
    costs, p, m = of_row(TABLE_5[row]), TABLE_5[row]["ranks"], TABLE_5[row]["microbatches"]
    timelines = [simulate(v_shape(name, costs, m), costs) for name in NAMES]
    for timeline, name in zip(timelines, NAMES, strict=True):
        assert max(timeline.peak_memory) <= most(name, p) * (1 + 1e-9)
    full, middle, small = (timeline.bubble_ratio for timeline in timelines)
    assert full < middle < small
    # With about half of its memory V-Half still beats 1F1B. V-Min does so if F = B = W. Here F + B
    # are over two thirds of the work.
    assert middle < half < TABLE_5[row]["bubble"]["1f1b"]
    assert small < least


def test_v_half_and_v_min_have_less_bubble_than_1f1b() -> None:
    for name, bubble in (("v-half", 0.13), ("v-min", 0.16)):
        timeline = simulate(v_shape(name, halves(8, 2, 2, 2), 24), halves(8, 2, 2, 2))
        assert timeline.bubble_ratio < bubble < 7 / 31  # 1F1B's (p - 1) / (m + p - 1)


def test_uneven_costs_shape_the_schedule() -> None:
    # One slow stage: what is made for its true costs is no longer than what is made for their mean.
    costs = halves(4, 2, 2, 2, 0.1)
    slow = Costs(
        (*costs.stages[:3], StageCost(1.6, 1.6, 1.6, 0.5, -0.25, -0.25), *costs.stages[4:]),
        costs.links,
    )
    for name in NAMES:
        assert simulate(v_shape(name, slow, 12), slow).span <= simulate(
            v_shape(name, costs, 12), slow
        ).span * (1 + 1e-9)


def test_memory_in_whole_numbers_gives_the_same_schedule() -> None:
    whole = Costs((StageCost(1, 1, 1, 2, -1, -1),) * 4, (0, 0, 0))
    assert v_shape("zb-v", whole, 4) == v_shape("zb-v", halves(2, 2, 2, 2), 4)


def test_frozen_prefix_is_short_and_holds_no_memory() -> None:
    costs = halves(4, 2, 2, 2)
    for name in NAMES:
        timeline = simulate(v_shape(name, costs, 12, first_trainable=5), costs)
        assert timeline.peak_memory[3] == 0  # both its stages, 3 and 4, are frozen
        assert timeline.span < simulate(v_shape(name, costs, 12), costs).span


@pytest.mark.parametrize(
    ("costs", "options", "message"),
    [
        (halves(2, 1, 1, 1), {"microbatches": 0}, "0 microbatches"),
        (Costs(halves(2, 1, 1, 1).stages[:3], (0.0, 0.0)), {}, "costs are given for 3"),
        (Costs((), ()), {}, "costs are given for 0"),
        (halves(2, 1, 1, 1), {"first_trainable": 4}, "first trainable stage 4 of 4"),
        (halves(2, 1, 1, 1), {"caps": [1]}, "1 memory limits for 2 ranks"),
        (halves(2, 1, 1, 1), {"caps": [1, 0.9]}, "rank 1 is 0.9"),
        (halves(2, 1, 1, 1), {"caps": [float("nan"), 1]}, "limit of rank 0 is nan"),
        (halves(2, 1e300, 1, 1), {}, "larger unit"),
        (halves(2, 1e308, 1e308, 1e308), {}, "larger unit"),
    ],
)
def test_bad_requests_are_refused(costs: Costs, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        v_shape("zb-v", costs, **{"microbatches": 4, **options})
    assert message in str(caught.value)
