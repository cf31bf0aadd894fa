"""The bounds, the search and the baselines of `benchmarks.repack`."""

from __future__ import annotations

from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import repack_cases
from benchmarks.cost_traces import Layers, best, dense, timeline, trace
from benchmarks.repack import MICROBATCHES, least_seconds
from benchmarks.repack_cases import FROZEN, halved, share_of, sleep
from benchmarks.repack_search import search_placements, window_seconds
from dynmo.cost.layer_cost import LayerCost
from dynmo.plan.partition import Partition

Times = list[tuple[float, float, float]]
COSTS = st.lists(st.tuples(*[st.floats(0.1, 4)] * 3), min_size=4, max_size=9)
SPARSE_COSTS = st.lists(
    st.tuples(st.floats(0, 4), st.floats(0.1, 4), st.sampled_from([0.0, 0.3, 4])),
    min_size=2,
    max_size=8,
)


def layers_of(costs: Times) -> Layers:
    return tuple(LayerCost(*each) for each in costs)


def placements(layers: int, ranks: int) -> list[Partition]:
    cuts = combinations(range(1, layers), ranks - 1)
    return [Partition.from_bounds((0, *cut, layers)) for cut in cuts]


@given(COSTS, st.integers(1, 4))
def test_no_placement_is_under_the_bound(costs: Times, ranks: int) -> None:
    layers = layers_of(costs)
    placement = best(layers, ranks, MICROBATCHES)
    least = least_seconds(layers, ranks)
    assert timeline(layers, placement, MICROBATCHES).makespan >= least * (1 - 1e-9)


@given(SPARSE_COSTS, st.integers(1, 12), st.data())
def test_no_step_is_under_the_bound_of_a_window(
    costs: Times, microbatches: int, data: st.DataObject
) -> None:
    layers = layers_of(costs)
    ranks = data.draw(st.integers(1, len(layers)))
    placement = data.draw(st.sampled_from(placements(len(layers), ranks)))
    step = timeline(layers, placement, microbatches).makespan
    for low in range(ranks):
        for high in range(low, ranks):
            bound = window_seconds(layers, placement, microbatches, low, high)
            assert bound <= step * (1 + 1e-9)
    whole = window_seconds(layers, placement, microbatches, 0, placement.stages - 1)
    assert whole == pytest.approx(step)


@given(SPARSE_COSTS, st.integers(1, 12), st.data())
def test_search_agrees_with_all_placements(
    costs: Times, microbatches: int, data: st.DataObject
) -> None:
    layers = layers_of(costs)
    ranks = data.draw(st.integers(1, len(layers)))
    every = placements(len(layers), ranks)
    assert len(every) == comb(len(layers) - 1, ranks - 1)
    steps = [timeline(layers, placement, microbatches).makespan for placement in every]
    for limit in (min(steps), min(steps) * (1 - 1e-6), sorted(steps)[len(steps) // 2]):
        search = search_placements(layers, ranks, microbatches, limit)
        assert search.complete
        assert (search.placement is not None) == (min(steps) <= limit)
        if search.placement is not None:
            assert timeline(layers, search.placement, microbatches).makespan <= limit


def test_search_finds_the_only_placement_at_the_limit() -> None:
    """The bounds rule out most of the 969 placements of 20 layers on 4 ranks."""
    layers = layers_of([(1 + i % 3, 2 + i % 2, 1 + i % 5) for i in range(20)])
    least = min(timeline(layers, x, 8).makespan for x in placements(20, 4))
    first, ruled_out = (search_placements(layers, 4, 8, least * share) for share in (1, 1 - 1e-6))
    assert first.placement is not None
    assert ruled_out.placement is None
    assert ruled_out.complete
    assert ruled_out.replays < 100


def test_incomplete_search_is_reported() -> None:
    layers = layers_of([(1, 1, 1)] * 12)
    limit = timeline(layers, Partition((4, 4, 4)), 8).makespan
    stopped = search_placements(layers, 3, 8, limit, most=1)
    assert (stopped.placement, stopped.complete, stopped.replays) == (None, False, 1)
    assert search_placements(layers, 3, 8, limit).placement is not None


def test_a_frozen_prefix_is_rejected() -> None:
    with pytest.raises(ValueError, match="layer 0 is frozen"):
        search_placements(layers_of([(1, 0, 0), (1, 1, 1)]), 2, 4, 100)


@pytest.mark.parametrize(("frozen", "ranks"), [(0, 8), (28, 8), (30, 4), (46, 2)])
def test_pipeline_is_halved_when_the_rest_fits(frozen: int, ranks: int) -> None:
    """A sixth counts: 28 of 48 halves leave over half of the dense model, 30 leave just half."""
    layers = layers_of([(1.0, 0.0, 0.0)] * frozen + [(1.0, 1.0, 1.0)] * (48 - frozen))
    assert halved(layers, 8, room=3 * 3 * FROZEN).stages == ranks


def test_share_is_what_balancing_alone_lacks() -> None:
    assert share_of(static=10, balanced=8, repacked=6) == pytest.approx(0.5)
    assert share_of(static=10, balanced=8, repacked=8) == 0
    assert share_of(static=10, balanced=9.95, repacked=9.95) is None


def test_messages_make_a_step_longer() -> None:
    layers = dense(8, 2048)
    placement = best(layers, 4, MICROBATCHES, link=1.0)
    without, with_links = (timeline(layers, placement, MICROBATCHES, link=x) for x in (0.0, 1.0))
    assert with_links.makespan >= without.makespan + 6  # there and back through 3 links


@pytest.mark.matrix
@pytest.mark.parametrize("case", ["freezing", "pruning"])
def test_sleeping_ranks_run_the_last_moment(case: str) -> None:
    layers = trace(case, 24, 2048)[-1]
    measured = sleep(layers, best(layers, 2, MICROBATCHES), steps=2, unit=0.001)
    assert measured["ranks"] == 2
    assert measured["seconds"] > measured["simulated"] > 0


@pytest.mark.matrix
def test_throughput_of_sleeping_ranks_is_over_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repack_cases, "SHOWN", (2,))
    full, pruned = repack_cases.emulated(["pruning"], blocks=24, steps=2, unit=0.0005)
    assert (full["case"], full["throughput"]) == ("dense", 1)
    assert pruned["per_rank"] == pytest.approx(4 * pruned["throughput"])
    assert "pruning" in repack_cases.emulated_table([full, pruned])
