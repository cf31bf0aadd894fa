"""The table of a schedule has the same ops and dependencies as its Python objects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import make_by_hand
from dynmo.schedule.op import Dependency, Kind, Op, Schedule, check_order, dependencies, from_text
from tests.schedule.samples import schedules

KINDS = list(Kind)


@given(schedules(), st.none() | st.integers(1, 9))
def test_table_has_every_op_with_its_dependencies(schedule: Schedule, credits: int | None) -> None:
    if credits is not None and credits >= schedule.ranks:
        schedule = replace(schedule, credits=credits)
    table = schedule.table
    flat = [op for row in schedule.ops for op in row]
    assert [Op(KINDS[kind], s, j) for kind, s, j in table.ops.tolist()] == flat
    assert sorted(table.at.tolist()) == list(range(len(flat)))
    ops = [flat[i] for i in table.at.tolist()]
    placed = schedule.stage_ranks
    position = [0] * schedule.ranks
    for number, (rank, stage, kind, *waits) in enumerate(table.rows.tolist()):
        op = ops[number]
        assert (op.stage, KINDS[kind]) == (stage, op.kind)
        assert schedule.ops[rank][position[rank]] == op
        position[rank] += 1
        expected = [
            Dependency(before, boundary if crosses(placed, boundary) else None)
            for before, boundary in dependencies(schedule, op)
        ]
        found = [
            Dependency(ops[before], None if boundary < 0 else boundary)
            for before, boundary in zip(waits[::2], waits[1::2], strict=True)
            if before >= 0
        ]
        assert found == expected
        assert all(before < number for before in waits[::2])


def crosses(placed: tuple[int, ...], boundary: int | None) -> bool:
    return boundary is not None and placed[boundary] != placed[boundary + 1]


def test_table_counts_the_ops_of_1f1b() -> None:
    table = make_by_hand("1f1b", 2, 2).table
    assert table.counts.tolist() == [[2, 0, 0, 2], [2, 0, 0, 2]]
    assert table.first.tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    "rows",
    [
        "0 | F0 BW0 F1 BW1\n1 | F0 F1 BW0 BW1\n",
        "0 | F0 F1 BW0 BW1\n1 | F0 BW0 BW1\n",  # an op that is nowhere
    ],
)
def test_table_lacks_ops_that_never_run(rows: str) -> None:
    schedule = from_text("# stuck  ranks=2 microbatches=2 placement=0,1\n" + rows)
    assert len(schedule.table.rows) < len(schedule.table.ops)
    with pytest.raises(ScheduleError, match="never runs: a circle"):
        check_order(schedule)


@pytest.mark.parametrize("change", [{"stage_ranks": (0,)}, {"credits": -1}])
def test_table_of_numbers_out_of_range_is_refused(change: dict[str, Any]) -> None:
    """The compiled loops would read what is not theirs."""
    schedule = replace(make_by_hand("1f1b", 2, 2, first_trainable=1), **change)
    with pytest.raises(ScheduleError, match="an op is outside"):
        _ = schedule.table
