"""Every schedule by its name: placement, number of stages, and what is refused."""

from __future__ import annotations

import pytest

from dynmo.cost.layer_cost import uniform_costs
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.make import make
from dynmo.schedule.catalogue import SCHEDULES, check_microbatches, chunks_of, placement_of
from dynmo.schedule.op import validate


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 4), (3, 6), (4, 4)])
def test_each_is_made_and_holds_together(name: str, ranks: int, microbatches: int) -> None:
    schedule = make(name, ranks, microbatches)
    validate(schedule)
    assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, ranks, microbatches)
    assert schedule.placement == placement_of(name, ranks)
    assert schedule.stages == ranks * chunks_of(name)


def test_placements() -> None:
    assert placement_of("zb-auto", 3) == (0, 1, 2)
    assert placement_of("interleaved-1f1b", 3) == (0, 1, 2, 0, 1, 2)
    assert placement_of("interleaved-1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert placement_of("v-min", 3) == (0, 1, 2, 2, 1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zb-h9", 4, 4), "unknown schedule 'zb-h9'; choose one of gpipe, 1f1b"),
        (("interleaved-1f1b", 4, 6), "6 microbatches are not a multiple of 4 ranks; use 4 or 8"),
        (("interleaved-1f1b", 4, 3), "3 microbatches are not a multiple of 4 ranks; use 4"),
        (("1f1b", 4, 0), "0 microbatches; at least 1 is needed"),
        (("zb-v", 0, 4), "0 ranks; at least 1 is needed"),
    ],
)
def test_what_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ScheduleError) as error:
        make(*arguments)
    assert message in str(error.value)


def test_chunks_that_a_schedule_cannot_have() -> None:
    with pytest.raises(ScheduleError, match="zb-v has 2 stages a rank, not 3; leave chunks out"):
        chunks_of("zb-v", 3)
    with pytest.raises(ScheduleError, match="at least 1 stage"):
        chunks_of("interleaved-1f1b", 0)
    with pytest.raises(ScheduleError, match="has 8 stages, but costs are given for 4"):
        make("zb-v", 4, 8, costs=uniform_costs(4, 1, 1, 1))
    check_microbatches("zb-v", 4, 3)
