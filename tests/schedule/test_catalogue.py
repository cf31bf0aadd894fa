"""Every schedule by name: placement, number of stages and refused requests."""

from __future__ import annotations

from typing import get_args

import pytest

from dynmo.cost.layer_cost import uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.catalogue import (
    AUTO,
    SCHEDULES,
    ScheduleName,
    check_microbatches,
    chunks_of,
    make,
    stage_ranks_of,
)
from dynmo.schedule.op import validate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (3, 6), (4, 4)])
def test_every_schedule_by_name_is_valid(name: str, ranks: int, microbatches: int) -> None:
    schedule = make(name, ranks, microbatches)
    validate(schedule)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, ranks, microbatches)
    assert schedule.stage_ranks == stage_ranks_of(name, ranks)
    assert schedule.stages == ranks * chunks_of(name)


def test_the_type_of_names_has_every_schedule() -> None:
    assert {*get_args(ScheduleName)} == {*SCHEDULES, AUTO}


def test_placements_of_schedules_by_name() -> None:
    assert stage_ranks_of("zb-auto", 3) == (0, 1, 2)
    assert stage_ranks_of("interleaved-1f1b", 3) == (0, 1, 2, 0, 1, 2)
    assert stage_ranks_of("interleaved-1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert stage_ranks_of("v-min", 3) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zb-h9", 4, 4), "'zb-h9'; choose one of gpipe"),
        (("interleaved-1f1b", 4, 6), "use 4 or 8"),
        (("interleaved-1f1b", 4, 3), "use 4"),
        (("1f1b", 4, 0), "0 microbatches"),
        (("zb-v", 0, 4), "0 ranks"),
    ],
)
def test_bad_requests_are_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        make(*arguments)
    assert message in str(error.value)


def test_impossible_numbers_of_chunks_are_refused() -> None:
    with pytest.raises(ScheduleError, match="zb-v has 2 stages a rank, not 3"):
        chunks_of("zb-v", 3)
    with pytest.raises(ScheduleError, match="at least 1 stage"):
        chunks_of("interleaved-1f1b", 0)
    with pytest.raises(ScheduleError, match="8 stages"):
        make("zb-v", 4, 8, costs=uniform_costs(4, 1, 1, 1))
    check_microbatches("zb-v", 4, 3)
