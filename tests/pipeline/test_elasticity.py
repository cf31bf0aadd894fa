"""The machines that a run gives back."""

from __future__ import annotations

from dynmo.elastic.manager import RankPlace
from dynmo.pipeline.elasticity import _nodes


def test_machine_on_which_the_store_depends_has_no_name() -> None:
    """Under dynmo's launcher, ranks that a user has started do not outlive the others."""
    first, second = RankPlace(0, "a", 1, "a", 0), RankPlace(1, "b", 2, "b", 1)
    by_hand, beside = RankPlace(1, "b", 2, "b"), RankPlace(1, "b", 2, "b", 1, stays=True)
    assert _nodes([first, second]) == ["a", "b"]
    assert _nodes([first, by_hand]) == ["", "b"]
    assert _nodes([first, beside, RankPlace(2, "b", 3, "b", 2)]) == ["a", "", ""]
