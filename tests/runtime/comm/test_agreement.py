"""Ranks compare their decisions and name the ranks that differ."""

from __future__ import annotations

import pytest

from tests.pool import Pool

JOBS = "tests.runtime.jobs.world:"


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (["a", "a", "a"], ""),
        (["a", None, "a"], ""),
        ([None, None, None], ""),
        (["a", "b", "a"], "rank 0 and rank 1 disagree on the plan"),
        (["a", "b", "b"], "rank 0 and ranks 1, 2 disagree on the plan"),
        ([None, "a", "b"], "rank 1 and rank 2 disagree on the plan"),
    ],
)
def test_disagreeing_ranks_are_named_on_all_ranks(
    pool: Pool, said: list[str | None], text: str
) -> None:
    """Ranks that took no part in the decision get the same message."""
    results = pool.run(JOBS + "agree", 3, said=said)
    assert len(set(results)) == 1
    assert results[0].split(";")[0] == text


@pytest.mark.parametrize(
    ("lists", "difference"),
    [
        (["ab", "ab", "ab"], None),
        (["abc", "axc", "abx"], [1, [1]]),
        (["abc", "abx", "aby"], [2, [1, 2]]),
        (["ab", "abc", "ab"], [2, [1]]),
        (["", "a", ""], [0, [1]]),
    ],
)
def test_compare_finds_the_first_difference(
    pool: Pool, lists: list[str], difference: list[object] | None
) -> None:
    assert pool.run(JOBS + "compare", 3, lists=lists) == [difference] * 3
