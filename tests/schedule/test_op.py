from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import make
from dynmo.schedule.op import (
    Dependency,
    Kind,
    Op,
    Schedule,
    dependencies,
    name,
    validate,
)
from tests.schedule.samples import from_text, schedules

F, B, W, BW = Kind.F, Kind.B, Kind.W, Kind.BW


def needs(schedule: Schedule, op: Op) -> list[Dependency]:
    return list(dependencies(schedule, op))


def test_dependencies_of_a_split_backward() -> None:
    s = make("zb-h1", 3, 4)
    assert needs(s, Op(F, 0, 2)) == []
    assert needs(s, Op(F, 1, 2)) == [(Op(F, 0, 2), 0)]
    assert needs(s, Op(B, 1, 2)) == [(Op(F, 1, 2), None), (Op(B, 2, 2), 1)]
    assert needs(s, Op(B, 2, 2)) == [(Op(F, 2, 2), None)]
    assert needs(s, Op(W, 1, 2)) == [(Op(B, 1, 2), None)]


def test_dependencies_of_a_fused_backward() -> None:
    s = make("1f1b", 3, 4)
    assert needs(s, Op(BW, 1, 2)) == [(Op(F, 1, 2), None), (Op(BW, 2, 2), 1)]
    s = from_text("# mixed  ranks=2 microbatches=1 placement=0,1\n0 | F0 B0 W0\n1 | F0 BW0\n")
    validate(s)
    assert needs(s, Op(B, 0, 0)) == [(Op(F, 0, 0), None), (Op(BW, 1, 0), 0)]


def test_credits_limit_how_far_forward_only_stages_run_ahead() -> None:
    s = make("1f1b", 3, 9, first_trainable=1)
    assert needs(s, Op(F, 0, 2)) == []
    assert needs(s, Op(F, 0, 7)) == [(Op(F, 1, 4), 0)]  # as many ahead as there are ranks
    assert needs(replace(s, credits=1), Op(F, 0, 7)) == [(Op(F, 1, 6), 0)]
    assert needs(s, Op(F, 1, 7)) == [(Op(F, 0, 7), 0)]  # the first stage that trains is not held


def test_text_matches_the_example_in_the_docstring() -> None:
    assert str(make("zb-h1", 3, 4)) == (
        "# zb-h1  ranks=3 microbatches=4 placement=0,1,2\n"
        "0 | F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3\n"
        "1 | F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3\n"
        "2 | F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3\n"
    )


def test_text_names_the_stage_if_a_rank_has_several() -> None:
    text = (
        "# v  ranks=2 microbatches=1 placement=0,1,1,0\n0 | 0F0 3F0 3BW0 0BW0\n"
        "1 | 1F0 2F0 2BW0 1BW0\n"
    )
    schedule = from_text(text)
    validate(schedule)
    assert schedule.stages_of(0) == (0, 3)
    assert str(schedule) == text


@given(schedules(), st.none() | st.integers(1, 9))
def test_text_reads_back(schedule: Schedule, credits: int | None) -> None:
    schedule = replace(schedule, credits=credits)
    assert from_text(str(schedule)) == schedule


@given(schedules())
def test_any_runnable_order_is_valid(schedule: Schedule) -> None:
    validate(schedule)


def missing(row: list[Op], data: st.DataObject) -> str:
    del row[data.draw(st.integers(0, len(row) - 1))]
    return "."


def duplicate(row: list[Op], data: st.DataObject) -> str:
    row.insert(data.draw(st.integers(0, len(row))), data.draw(st.sampled_from(row)))
    return "."


def out_of_order(row: list[Op], data: st.DataObject) -> str:
    pairs = [(i, j) for i, j in combinations(range(len(row)), 2) if row[i][:2] == row[j][:2]]
    assume(pairs)
    i, j = data.draw(st.sampled_from(pairs))
    row[i], row[j] = row[j], row[i]
    return "is due"


def backward_first(row: list[Op], data: st.DataObject) -> str:
    firsts = [i for i, op in enumerate(row) if op.kind is not F and op.microbatch == 0]
    assume(firsts)
    row.insert(0, row.pop(data.draw(st.sampled_from(firsts))))
    return "a circle"


@pytest.mark.parametrize("spoil", [missing, duplicate, out_of_order, backward_first])
@given(schedule=schedules(), data=st.data())
def test_spoiled_row_is_refused(
    spoil: Callable[[list[Op], st.DataObject], str], schedule: Schedule, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    rows = [list(row) for row in schedule.ops]
    message = spoil(rows[rank], data)
    with pytest.raises(ScheduleError, match=message):
        validate(replace(schedule, ops=tuple(map(tuple, rows))))


def test_op_on_the_wrong_rank_is_refused() -> None:
    schedule = make("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="not placed there"):
        validate(replace(schedule, ops=schedule.ops[::-1]))


def test_cyclic_wait_is_named() -> None:
    # Rank 0 will not run F1 before B0, rank 1 not B0 before F1.
    schedule = from_text(
        "# stuck  ranks=2 microbatches=2 placement=0,1\n0 | F0 BW0 F1 BW1\n1 | F0 F1 BW0 BW1\n"
    )
    with pytest.raises(
        ScheduleError, match=r"rank 0 .* BW of microbatch 0 on stage 0 .* stage 1.* a circle"
    ):
        validate(schedule)


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("ranks=1 microbatches=0 placement=0", "0 |", "0 microbatches"),
        ("ranks=1 microbatches=1 placement=1", "0 |", "names a rank outside 0..0"),
        (
            "ranks=2 microbatches=1 placement=0,0",
            "0 | 0F0 1F0 1BW0 0BW0\n1 |",
            "ranks without a stage",
        ),
        (
            "ranks=1 microbatches=1 placement=0 first_trainable=1",
            "0 | F0",
            "first trainable stage 1 of 1",
        ),
        (
            "ranks=2 microbatches=1 placement=0,1 first_trainable=1",
            "0 | F0 BW0\n1 | F0 BW0",
            "on a frozen stage",
        ),
        (
            "ranks=1 microbatches=3 placement=0",
            "0 | F0 F2 F2 BW0 BW1 BW2",
            "runs F of microbatch 2 on stage 0 where microbatch 1 of F",
        ),
        ("ranks=1 microbatches=1 placement=0", "0 | F0 B0", "stage 0 has 0 of 1 W ops"),
        (
            "ranks=1 microbatches=1 placement=0",
            "0 | F0 B0 BW0",
            "runs BW of microbatch 0 on stage 0 where microbatch 1 of B is due",
        ),
    ],
)
def test_broken_schedules_are_refused(header: str, rows: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(from_text(f"# x  {header}\n{rows}\n"))
    assert "\n" not in str(caught.value)


def test_op_name_for_messages() -> None:
    assert name(Op(BW, 1, 3)) == "BW of microbatch 3 on stage 1"
