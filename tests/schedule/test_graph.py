"""The numbers of a schedule stand for the same ops and dependencies as its Python objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import Dependency, Kind, Op, Schedule, check_order, dependencies
from tests.schedule.samples import from_text, schedules

KINDS = list(Kind)


def needed(schedule: Schedule, op: Op) -> set[Dependency]:
    """Written out again: the definition in Zero Bubble, section 3, and the credits."""
    (kind, s, j), ranks = op, schedule.stage_ranks
    ahead = schedule.ranks if schedule.credits is None else schedule.credits

    def crosses(boundary: int) -> int | None:
        return None if ranks[boundary] == ranks[boundary + 1] else boundary

    found: set[Dependency] = set()
    if kind is Kind.F:
        if s > 0:
            found.add(Dependency(Op(Kind.F, s - 1, j), crosses(s - 1)))
        if s < schedule.first_trainable and j >= ahead:
            found.add(Dependency(Op(Kind.F, s + 1, j - ahead), crosses(s)))
    elif kind is Kind.W:
        found.add(Dependency(Op(Kind.B, s, j), None))
    else:
        found.add(Dependency(Op(Kind.F, s, j), None))
        if s + 1 < schedule.stages:
            fused = any(Op(Kind.BW, s + 1, j) in row for row in schedule.ops)
            found.add(Dependency(Op(Kind.BW if fused else Kind.B, s + 1, j), crosses(s)))
    return found


@given(schedules(), st.none() | st.integers(1, 9))
def test_every_row_stands_behind_the_ops_that_it_waits_for(
    schedule: Schedule, credits: int | None
) -> None:
    if credits is not None and credits >= schedule.ranks:
        schedule = replace(schedule, credits=credits)
    flat = [op for row in schedule.ops for op in row]
    rows, at = schedule.order[:2]
    assert sorted(at.tolist()) == list(range(len(flat)))
    position, done = [0] * schedule.ranks, set[Op]()
    ops = [flat[place] for place in at.tolist()]
    for (rank, lane, j, *before), place in zip(rows.tolist(), at.tolist(), strict=True):
        op = Op(KINDS[lane // schedule.stages], lane % schedule.stages, j)
        assert op == flat[place] == schedule.ops[rank][position[rank]]
        position[rank] += 1
        assert set(dependencies(schedule, op)) == needed(schedule, op)
        assert {d.op for d in needed(schedule, op)} == {ops[row] for row in before if row >= 0}
        assert {d.op for d in needed(schedule, op)} <= done
        done.add(op)


def test_order_counts_the_ops_of_1f1b() -> None:
    order = make("1f1b", 2, 2).order
    assert order.counts.tolist() == [2, 2, 0, 0, 0, 0, 2, 2]


@pytest.mark.parametrize(
    "rows",
    [
        "0 | F0 BW0 F1 BW1\n1 | F0 F1 BW0 BW1\n",
        "0 | F0 F1 BW0 BW1\n1 | F0 BW0 BW1\n",  # an op that is nowhere
    ],
)
def test_order_lacks_ops_that_never_run(rows: str) -> None:
    schedule = from_text("# stuck  ranks=2 microbatches=2 placement=0,1\n" + rows)
    assert len(schedule.order.rows) < len(schedule.order.lanes)
    with pytest.raises(ScheduleError, match="never runs: a circle"):
        check_order(schedule)


@pytest.mark.parametrize("change", [{"stage_ranks": (0,)}, {"credits": -1}])
def test_order_of_numbers_out_of_range_is_refused(change: dict[str, Any]) -> None:
    """The compiled loops would read what is not theirs."""
    schedule = replace(make("1f1b", 2, 2, first_trainable=1), **change)
    with pytest.raises(ScheduleError, match="an op is outside"):
        _ = schedule.order
