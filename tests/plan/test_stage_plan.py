"""Schedules within the whole memory of a rank: also pending messages and workspaces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.partition import Partition, uniform
from dynmo.plan.stage_costs import pipeline_costs
from dynmo.plan.stage_plan import StageRequest, inherent_idle, plan_stages
from dynmo.schedule.automatic.make import make
from dynmo.schedule.catalogue import stage_ranks_of
from dynmo.schedule.memory import rank_memory
from dynmo.schedule.op import Schedule
from dynmo.schedule.simulator import simulate

MIB = 1 << 20
LAYER = LayerCost(1.0, 1.0, 1.0, 0, *(MIB * x for x in (1, 1, 2, 4, 2, 1, 3)))


def schedule_within(
    limit: int | None,
    layers: Sequence[LayerCost],
    partition: Partition,
    microbatches: int,
    name: str = "zb-auto",
) -> Schedule:
    ranks = partition.stages // (2 if name == "zb-v" else 1)
    request = StageRequest(name, ranks, microbatches, memory_limit=limit)
    return plan_stages(request, tuple(layers), partition, None, 0).schedule


def test_inherent_idle_of_equal_stages() -> None:
    """1F1B waits for (p - 1)(F + B + W), ZB-H1 for (p - 1)(F + B - W)."""
    f, b, w, ranks, microbatches = 0.3, 0.4, 0.2, 4, 16
    work = microbatches * (f + b + w)
    for name, waits in (("1f1b", 3 * (f + b + w)), ("zb-h1", 3 * (f + b - w))):
        request = StageRequest(name, ranks, microbatches, memory_limit=MIB)
        assert inherent_idle(request, (), f, b, w) == pytest.approx(waits / (work + waits))
    # In the least memory, a schedule made from costs waits longer.
    request, layers = StageRequest("1f1b", ranks, microbatches), (LAYER,) * 8
    limit = min(plan_stages(request, layers, uniform(8, 4), None, 0).memory)
    least, roomy = (
        inherent_idle(replace(request, schedule="zb-auto", memory_limit=bound), layers, f, b, w)
        for bound in (limit, None)
    )
    assert roomy < least < 1


@pytest.mark.parametrize("spare", [1.0, 1.1, 1.5, 2.0])
def test_schedule_fits_and_is_faster_if_1f1b_fits(spare: float) -> None:
    """There are 32 microbatches, so that many messages may be pending."""
    layers, partition = [LAYER] * 8, uniform(8, 4)
    limit = int(spare * max(rank_memory(layers, partition.counts, make("1f1b", 4, 32))))
    schedule = schedule_within(limit, layers, partition, 32)
    assert max(rank_memory(layers, partition.counts, schedule)) <= limit
    costs = pipeline_costs(layers, partition)
    assert simulate(schedule, costs).span < simulate(make("1f1b", 4, 32), costs).span, (
        "and it is the better for it"
    )


def test_unlimited_schedule_needs_at_most_twice_1f1b_memory() -> None:
    layers, partition = [LAYER] * 8, uniform(8, 4)
    alive = max(rank_memory(layers, partition.counts, schedule_within(None, layers, partition, 32)))
    assert alive < 2 * max(rank_memory(layers, partition.counts, make("1f1b", 4, 32)))


sizes = st.integers(0, 8 * MIB)


@st.composite
def uneven(draw: st.DrawFn) -> LayerCost:
    f, b, w = (draw(st.floats(0.1, 3.0)) for _ in range(3))
    stash, activation = sorted((draw(sizes), draw(sizes)))
    weight, output, workspace = draw(sizes), draw(sizes), draw(sizes)
    held = (weight, weight, 2 * weight, activation, stash, output, workspace)
    return LayerCost(f, b, w, 0, *held)


@given(
    st.lists(uneven(), min_size=8, max_size=8),
    st.integers(1, 12),
    st.sampled_from(["zb-auto", "zb-v"]),
    st.floats(0.0, 2.0),
)
def test_schedule_within_any_feasible_limit_exists(
    layers: list[LayerCost], microbatches: int, name: str, share: float
) -> None:
    """From the need of the tightest schedule to twice that of 1F1B."""
    partition, ranks = uniform(8, 4), 2 if name == "zb-v" else 4
    costs, placement = pipeline_costs(layers, partition), stage_ranks_of(name, ranks)
    one = [0.0] * ranks
    for stage, rank in zip(costs.stages, placement, strict=True):
        one[rank] += stage.held
    need = partial(rank_memory, layers, partition.counts)
    least = max(need(make(name, ranks, microbatches, costs=costs, caps=one)))
    usual = least if name == "zb-v" else max(need(make("1f1b", ranks, microbatches)))
    limit = int(least + share * max(0, usual - least))
    assert max(need(schedule_within(limit, layers, partition, microbatches, name))) <= limit
