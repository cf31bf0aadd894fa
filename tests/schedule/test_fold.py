"""A schedule of several ranks, folded onto one rank."""

from __future__ import annotations

from collections import defaultdict

import pytest

from dynmo.schedule.catalogue import SCHEDULES, chunks_of, make
from dynmo.schedule.fold import fold
from dynmo.schedule.lowering import Compute, fuse, lower
from dynmo.schedule.op import Op, dependencies, from_text, to_text, validate


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_folds_onto_one_rank(name: str, first: int) -> None:
    schedule = make(name, 3, 6, first_trainable=first)
    folded = fold(schedule)
    validate(folded)
    assert folded.stage_ranks == (0,) * 3 * chunks_of(name)
    (row,) = folded.ops
    by_rank: defaultdict[int, list[Op]] = defaultdict(list)
    for op in row:
        by_rank[schedule.stage_ranks[op.stage]].append(op)
    assert tuple(tuple(by_rank[rank]) for rank in range(3)) == fuse(schedule).ops
    # Ops that several ranks wait for stand before them, the credits of a frozen prefix too.
    done = set[Op]()
    for op in row:
        assert all(d.op in done for d in dependencies(fuse(schedule), op))
        done.add(op)


def test_folded_schedule_matches_the_drawing() -> None:
    folded = fold(make("zb-h1", 2, 2))
    assert to_text(folded).splitlines()[1:] == ["0 | 0F0 0F1 1F0 1B0 0BW0 1F1 1B1 0BW1 1W0 1W1"]
    assert from_text(to_text(folded)) == folded


def test_folded_schedule_lowers_to_a_program_without_messages() -> None:
    (program,) = lower(fold(make("zb-h1", 4, 8)))
    assert all(isinstance(i, Compute) for i in program.instructions)
    assert (program.stages, program.depth) == ((0, 1, 2, 3), {})
