from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.make import make
from dynmo.schedule.catalogue import SCHEDULES, make_by_hand
from dynmo.schedule.generators import GENERATORS
from dynmo.schedule.op import Kind, Op, from_text, to_text, validate
from dynmo.schedule.simulator import Timeline, peak_memory, simulate
from tests.schedule.samples import PUBLISHED, times_of

GOLDEN = sorted((Path(__file__).parent / "golden").rglob("*.txt"))

times = st.integers(1, 50)
ranks = st.integers(1, 8)


def run(name: str, p: int, m: int, f: float, b: float, w: float, comm: float = 0.0) -> Timeline:
    return simulate(make_by_hand(name, p, m), uniform_costs(p, f, b, w, comm))


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
    assert to_text(schedule) == path.read_text()


def test_every_schedule_has_a_golden_file() -> None:
    names = {from_text(path.read_text()).name for path in GOLDEN}
    assert names == {*SCHEDULES} - {"zb-auto", "v-auto"}, "these are made by a search"


@given(st.sampled_from(sorted(GENERATORS)), ranks, st.integers(1, 24), st.data())
def test_any_schedule_is_valid(name: str, p: int, m: int, data: st.DataObject) -> None:
    first_trainable = data.draw(st.integers(0, p - 1))
    schedule = make_by_hand(name, p, m, first_trainable)
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
    assert peak_memory(make_by_hand("gpipe", p, m), costs) == (m,) * p
    assert peak_memory(make_by_hand("1f1b", p, m), costs) == tuple(p - rank for rank in range(p))
    h1, h2 = (peak_memory(make_by_hand(name, p, m), costs) for name in ("zb-h1", "zb-h2"))
    assert max(h1) == h1[0] == p
    assert max(h2) == h2[0] == 2 * p - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 0, 4, 0), "0 ranks and 4 microbatches"),
        (("zb-h1", 4, 4, 4), "first trainable stage 4 of 4"),
        (("zb-h1", 4, 4, -1), "first trainable stage -1 of 4"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        make_by_hand(*arguments)
