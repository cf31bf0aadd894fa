"""The fewest ranks that are fast enough, and those that stay."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.errors import PartitionError
from dynmo.plan.partition import Partition, exact, uniform
from dynmo.plan.repack import fewest_ranks, kept_ranks

LOADS = st.lists(st.integers(1, 9), min_size=2, max_size=8)


def slowest(loads: list[int], partition: Partition) -> float:
    return max(sum(loads[i] for i in partition.range_of(rank)) for rank in range(partition.stages))


@given(LOADS, st.integers(1, 40))
def test_fewest_ranks_equals_a_search_of_all_placements(loads: list[int], limit: int) -> None:
    """The search is compared with all placements of all numbers of ranks."""
    choice = fewest_ranks(
        lambda ranks: exact([float(x) for x in loads], ranks),
        lambda p: slowest(loads, p),
        limit,
        len(loads),
    )
    fast = [
        ranks
        for ranks in range(1, len(loads) + 1)
        for ends in combinations(range(1, len(loads)), ranks - 1)
        if slowest(loads, Partition.from_bounds((0, *ends, len(loads)))) <= limit
    ]
    assert (choice.partition.stages if choice else None) == min(fast, default=None)


def test_rank_counts_without_a_placement_are_skipped() -> None:
    choice = fewest_ranks(
        lambda ranks: None if ranks < 3 else uniform(6, ranks), lambda p: 6 / p.stages, 3.0, 6
    )
    assert choice is not None
    assert choice.partition.stages == 3
    assert fewest_ranks(lambda ranks: None, lambda p: 0.0, 1.0, 4) is None
    with pytest.raises(PartitionError, match="at least 5 of 4 ranks"):
        fewest_ranks(lambda ranks: None, lambda p: 0.0, 1.0, 4, least=5)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), st.data())
def test_kept_ranks_empty_the_most_nodes(nodes: list[str], data: st.DataObject) -> None:
    """The result is compared with all choices of ranks."""
    count = data.draw(st.integers(1, len(nodes)))
    kept = kept_ranks(nodes, count)
    assert kept[0] == 0
    assert list(kept) == sorted(set(kept))
    assert len(kept) == count
    others = ((0, *more) for more in combinations(range(1, len(nodes)), count - 1))
    assert len({nodes[rank] for rank in kept}) == min(
        len({nodes[r] for r in other}) for other in others
    )


def test_small_nodes_are_emptied_first() -> None:
    assert kept_ranks(("n",) * 5, 3) == (0, 1, 2)
    assert kept_ranks("aabbcc", 4) == (0, 1, 2, 3), "of equally small nodes the last is emptied"
    assert kept_ranks("abbaab", 4) == (0, 1, 3, 4), "the node of rank 0 stays longest"
    with pytest.raises(PartitionError, match="0 of 2 ranks cannot stay"):
        kept_ranks("ab", 0)
    with pytest.raises(PartitionError, match="3 of 2 ranks cannot stay"):
        kept_ranks("ab", 3)
