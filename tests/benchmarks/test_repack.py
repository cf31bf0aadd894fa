"""The bound and the sides of `benchmarks.repack`."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cost_traces import best, timeline
from benchmarks.repack import BASELINES, MICROBATCHES, RANKS, least_seconds, row
from dynmo.cost.layer_cost import LayerCost

COSTS = st.lists(st.tuples(*[st.floats(0.1, 4)] * 3), min_size=4, max_size=9)


@settings(max_examples=20, deadline=None)
@given(COSTS, st.integers(1, 4))
def test_no_placement_is_under_the_bound(costs: list[tuple[float, float, float]], ranks: int) -> None:
    layers = tuple(LayerCost(*each) for each in costs)
    assert timeline(layers, best(layers, ranks, MICROBATCHES), MICROBATCHES).makespan >= least_seconds(layers, ranks) * (1 - 1e-9)


def test_no_baseline_needs_fewer_ranks() -> None:
    one = row("pruning", 24, stride=8)
    assert all(one["average"]["ours"] <= one["average"][name] <= RANKS for name in BASELINES)
    assert one["ranks"] == sorted(one["ranks"], reverse=True), "the model only becomes smaller"
    assert one["kept"] >= 1
