"""Published algorithms that merge ranks by memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.baselines.merging import best_fit, halving, round_robin
from benchmarks.repack import BASELINES
from dynmo.plan.balancers import first_fit
from dynmo.plan.partition import Partition, uniform

LOADS = st.lists(st.integers(1, 9), min_size=2, max_size=8)


@given(LOADS, st.integers(1, 60), st.data(), st.sampled_from(sorted(BASELINES)))
def test_baselines_keep_layers_and_memory(
    loads: list[int], limit: int, data: st.DataObject, name: str
) -> None:
    ranks = data.draw(st.integers(1, len(loads)))
    target = data.draw(st.integers(1, ranks))
    before = uniform(len(loads), ranks)
    after = BASELINES[name](before, loads, limit, target)
    assert after.layers == before.layers
    assert target <= after.stages <= before.stages
    assert set(after.bounds) <= set(before.bounds), "ranks merge whole"
    merged = [rank for rank in range(after.stages) if after.counts[rank] not in before.counts]
    assert all(sum(loads[i] for i in after.range_of(rank)) < limit for rank in merged)


def test_each_algorithm_merges_its_own_ranks() -> None:
    before, memory = Partition((1,) * 6), [1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    assert first_fit(before, memory, 4.5, 3).counts == (2, 2, 2)
    assert best_fit(before, memory, 4.5, 4).counts == (1, 2, 2, 1)
    assert round_robin(before, memory, 4.5, 4).counts == (2, 2, 1, 1)
    assert halving(before, memory, 4.5, 2).counts == (2, 2, 2)
    assert halving(before, memory, 3.5, 1).counts == before.counts
