"""The ranks that stay."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.errors import PartitionError
from dynmo.plan.meshes import kept_ranks


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
