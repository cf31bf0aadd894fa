from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.noise import in_order
from dynmo.cost.layer_cost import Costs, uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import SCHEDULES, make
from dynmo.schedule.lowering import lower
from dynmo.schedule.op import (
    Kind,
    Op,
    Schedule,
    validate,
)
from dynmo.schedule.simulator import Timeline, peak_memory, simulate
from tests.schedule.samples import BY_HAND, PUBLISHED, from_text, times_of

GOLDEN = sorted((Path(__file__).parent / "golden").rglob("*.txt"))

times = st.integers(1, 50)
ranks = st.integers(1, 8)


def run(name: str, p: int, m: int, f: float, b: float, w: float, comm: float = 0.0) -> Timeline:
    return simulate(make(name, p, m), uniform_costs(p, f, b, w, comm))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_schedule_equals_the_golden_file(path: Path) -> None:
    golden = from_text(path.read_text())
    validate(golden)
    schedule = make(
        golden.name,
        golden.ranks,
        golden.microbatches,
        costs=uniform_costs(golden.stages, 1, 1, 1),
        chunks=golden.stages // golden.ranks,
        first_trainable=golden.first_trainable,
    )
    assert str(schedule) == path.read_text()


def test_every_schedule_has_a_golden_file() -> None:
    names = {from_text(path.read_text()).name for path in GOLDEN}
    assert names == {*SCHEDULES} - {"zb-auto", "v-auto"}, "these are made by a search"


@given(st.sampled_from(BY_HAND), ranks, st.integers(1, 24), st.data())
def test_any_schedule_is_valid(name: str, p: int, m: int, data: st.DataObject) -> None:
    first_trainable = data.draw(st.integers(0, p - 1))
    schedule = make(name, p, m, first_trainable=first_trainable)
    validate(schedule)
    assert (schedule.name, schedule.microbatches) == (name, m)
    assert schedule.ranks == schedule.stages == p
    for rank in range(first_trainable):
        assert schedule.ops[rank] == tuple(Op(Kind.F, rank, j) for j in range(m))


@pytest.mark.parametrize("row", PUBLISHED)
@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-h2"])
def test_published_bubble_ratios(row: dict, name: str) -> None:
    timeline = run(name, row["ranks"], row["microbatches"], *times_of(row)[:4])
    assert round(timeline.bubble_ratio, 4) == row["bubble"][name]


# Whole times, so the closed forms are met exactly.


@given(ranks, st.integers(1, 24), times, times, times)
def test_gpipe_and_1f1b_have_their_closed_form_span(p: int, m: int, f: int, b: int, w: int) -> None:
    for name in ("gpipe", "1f1b"):
        timeline = run(name, p, m, f, b, w)
        assert timeline.span == timeline.makespan == (m + p - 1) * (f + b + w)


@pytest.mark.parametrize(("name", "k"), [("zb-h1", 1), ("zb-h2", 2)])
@given(p=ranks, more=st.integers(0, 9), f=times, b=times, w=times)
def test_zero_bubble_has_its_closed_form_span(
    name: str, k: int, p: int, more: int, f: int, b: int, w: int
) -> None:
    # This is the paper's (p - 1)(F + B - k W) if W <= F. A longer W fills no more of the bubble
    # than an F would.
    b, w = max(b, w), min(b, w)
    m = 2 * p - 1 + more
    assert run(name, p, m, f, b, w).span - m * (f + b + w) == (p - 1) * (f + b - k * min(f, w))


@given(ranks, st.integers(0, 12), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_peak_activations_match_the_formulas(p: int, more: int, w_memory: float) -> None:
    # Quarters, so the sums are exact.
    costs = uniform_costs(p, 1, 1, 1, w_memory=w_memory)
    m = 2 * p - 1 + more
    assert peak_memory(make("gpipe", p, m), costs) == (m,) * p
    assert peak_memory(make("1f1b", p, m), costs) == tuple(p - rank for rank in range(p))
    h1, h2 = (peak_memory(make(name, p, m), costs) for name in ("zb-h1", "zb-h2"))
    assert max(h1) == h1[0] == p
    assert max(h2) == h2[0] == 2 * p - 1


# The published runs give every rank as many layers as it takes to reach 24, 32, 48 and 64, and
# interleave single layers.
LAYERS = {"1.5B": 24, "6.2B": 32, "14.6B": 48, "28.3B": 64}


def interleaved(p: int, m: int, v: int, first_trainable: int = 0) -> Schedule:
    return make("interleaved-1f1b", p, m, chunks=v, first_trainable=first_trainable)


def published_span(schedule: Schedule, costs: Costs) -> float:
    """As the table's authors count: only a group's first message is waited for at a wrap."""
    p = schedule.ranks
    ended: dict[Op, float] = {}
    free, began = [0.0] * p, [-1.0] * p
    for rank, op, needs in in_order(schedule):
        start = free[rank]
        for before, boundary in needs:
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
def test_any_interleaving_is_valid(p: int, groups: int, v: int, data: st.DataObject) -> None:
    first_trainable = data.draw(st.integers(0, p * v - 1))
    schedule = interleaved(p, p * groups, v, first_trainable)
    validate(schedule)
    lower(schedule)
    assert schedule.stage_ranks == tuple(range(p)) * v
    assert from_text(str(schedule)) == schedule
    assert {op.kind for row in schedule.ops for op in row} == {Kind.F, Kind.BW}


@given(st.integers(1, 6), st.integers(1, 4))
def test_one_chunk_is_1f1b(p: int, groups: int) -> None:
    assert interleaved(p, p * groups, 1).ops == make("1f1b", p, p * groups).ops


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
def test_published_bubble_ratios_of_interleaving(row: dict) -> None:
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
    ("arguments", "first_trainable", "message"),
    [
        (("1f1b", 0, 4), 0, "0 ranks"),
        (("1f1b", 4, 0), 0, "0 microbatches"),
        (("zb-h1", 4, 4), 4, "first trainable stage 4 of 4"),
        (("zb-h1", 4, 4), -1, "first trainable stage -1 of 4"),
        (("interleaved-1f1b", 0, 4), 0, "0 ranks"),
        (("interleaved-1f1b", 2, 0), 0, "0 microbatches"),
        (("interleaved-1f1b", 2, 4), 4, "first trainable stage 4 of 4 stages"),
    ],
)
def test_bad_requests_are_refused(
    arguments: tuple[str, int, int], first_trainable: int, message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make(*arguments, first_trainable=first_trainable)
