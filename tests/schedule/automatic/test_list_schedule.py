from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import Costs, StageCost
from dynmo.errors import ScheduleError
from dynmo.schedule.automatic.list_schedule import list_schedule
from dynmo.schedule.automatic.vshape import v_shape
from dynmo.schedule.bounds import Objective
from dynmo.schedule.catalogue import v_stage_ranks
from dynmo.schedule.chunk_bounds import lower_bound_on
from dynmo.schedule.lowering import lower
from dynmo.schedule.op import validate
from dynmo.schedule.simulator import simulate
from tests.schedule.automatic.test_vshape import halves, takes, uneven


@given(st.data())
def test_any_costs_within_any_memory(data: st.DataObject) -> None:
    ranks, m = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    costs, frozen = data.draw(uneven(ranks)), data.draw(st.integers(0, 2 * ranks - 1))
    objective = data.draw(st.sampled_from(Objective))
    caps = [takes(costs, r, frozen) * data.draw(st.floats(1.0, 4.0)) for r in range(ranks)]
    schedule = list_schedule(costs, m, caps=caps, first_trainable=frozen, objective=objective)
    validate(schedule)
    lower(schedule)
    timeline = simulate(schedule, costs)
    for peak, cap in zip(timeline.peak_memory, caps, strict=True):
        assert peak <= cap * (1 + 1e-6) + 1e-9
    length = timeline.length(objective)
    least = lower_bound_on(v_stage_ranks(ranks), costs, m, frozen, objective)
    assert least <= length * (1 + 1e-9)
    # zb-v keeps to p activations besides. Its search is one of two that v-auto compares.
    blocks = v_shape("zb-v", costs, m, caps=caps, first_trainable=frozen, objective=objective)
    assert length <= simulate(blocks, costs).length(objective) * (1 + 1e-9)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_even_stages_have_no_bubble(ranks: int) -> None:
    costs = halves(ranks, 1.0, 1.0, 1.0)
    schedule = list_schedule(costs, 4 * ranks, caps=[2.0 * ranks] * ranks)
    assert simulate(schedule, costs).span == pytest.approx(12.0 * ranks)


def test_more_memory_than_zb_v_pays_with_uneven_stages() -> None:
    # Heavy stages in turn with light ones. Both stages of a rank together are alike.
    p, m = 8, 16
    heavy, light = (
        StageCost(0.4, 0.6, 0.2, 1.0, -0.5, -0.5),
        StageCost(0.1, 0.1, 0.1, 1.0, -0.5, -0.5),
    )
    down = [heavy if rank % 2 else light for rank in range(p)]
    up = [light if rank % 2 else heavy for rank in reversed(range(p))]
    costs = Costs((*down, *up), (0.0,) * (2 * p - 1))
    caps = [4.0 * p] * p
    ours = simulate(list_schedule(costs, m, caps=caps), costs).span
    blocks = simulate(v_shape("zb-v", costs, m, caps=caps), costs).span
    assert ours < 0.97 * blocks


def test_it_repeats_itself() -> None:
    costs = halves(3, 1.0, 1.5, 0.5)
    assert list_schedule(costs, 7) == list_schedule(costs, 7)


def test_a_limit_below_one_microbatch_is_refused() -> None:
    with pytest.raises(ScheduleError, match="v-auto: the memory limit of rank 1 is 0"):
        list_schedule(halves(3, 1, 1, 1), 4, caps=[3.0, 0.5, 3.0])
