"""Ranks compare their decisions and name the ranks that differ."""

from __future__ import annotations

from tests.pool import Pool

JOBS = "tests.runtime.jobs.world:"


SAID = [
    (["a", "a", "a"], ""),
    (["a", None, "a"], ""),
    ([None, None, None], ""),
    (["a", "b", "a"], "rank 0 and rank 1 disagree on the plan"),
    (["a", "b", "b"], "rank 0 and ranks 1, 2 disagree on the plan"),
    ([None, "a", "b"], "rank 1 and rank 2 disagree on the plan"),
]
LISTS = [
    (["ab", "ab", "ab"], None),
    (["abc", "axc", "abx"], [1, [1]]),
    (["abc", "abx", "aby"], [2, [1, 2]]),
    (["ab", "abc", "ab"], [2, [1]]),
    (["", "a", ""], [0, [1]]),
]


def test_disagreeing_ranks_are_named_on_all_ranks(pool: Pool) -> None:
    """Ranks that took no part in the decision get the same message."""
    for told in pool.run(JOBS + "agree", 3, said=[said for said, _ in SAID]):
        assert [text.split(";")[0] for text in told] == [text for _, text in SAID]


def test_compare_finds_the_first_difference(pool: Pool) -> None:
    told = pool.run(JOBS + "compare", 3, lists=[lists for lists, _ in LISTS])
    assert told == [[difference for _, difference in LISTS]] * 3
