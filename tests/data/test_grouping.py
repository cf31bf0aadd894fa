"""Microbatches and rows that cost alike."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.data.grouping import RowCost, grouped, packed

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=7)


def most_expensive(groups: list[list[int]], lengths: list[int], cost: RowCost) -> int:
    return max(cost.of(len(group), max(lengths[at] for at in group)) for group in groups)


@given(lengths=LENGTHS, count=st.integers(1, 7), quadratic=st.integers(0, 3))
def test_no_cut_of_the_sorted_samples_is_cheaper(
    lengths: list[int], count: int, quadratic: int
) -> None:
    count, cost = min(count, len(lengths)), RowCost(5, quadratic)
    groups = grouped(lengths, count, 1000, cost)
    assert sorted(at for group in groups for at in group) == list(range(len(lengths)))
    assert len(groups) == count
    assert all(groups)
    order = sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    cuts = [
        [order[a:b] for a, b in zip((0, *cut), (*cut, len(order)), strict=True)]
        for cut in combinations(range(1, len(order)), count - 1)
    ]
    best = min(most_expensive(cut, lengths, cost) for cut in cuts)
    assert most_expensive(groups, lengths, cost) == best


@given(rows=st.integers(1, 4), count=st.integers(1, 5), data=st.data())
def test_groups_have_no_more_tokens_than_full_rows(
    rows: int, count: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=rows * count, max_size=rows * count))
    groups = grouped(lengths, count, rows * 9, RowCost(1, 2))
    assert len(groups) == count
    assert all(len(group) * max(lengths[at] for at in group) <= rows * 9 for group in groups)


def test_one_long_sample_stays_alone() -> None:
    assert grouped([1, 1, 8, 1, 1, 1], 2, 100, RowCost()) == [[2], [0, 1, 3, 4, 5]]


@pytest.mark.parametrize("count", [1, 3])
def test_equal_samples_are_cut_evenly(count: int) -> None:
    groups = grouped([4] * 6, count, 100, RowCost())
    assert [len(group) for group in groups] == [6 // count] * count


LONGEST = 9


@given(count=st.integers(1, 5), rows=st.integers(1, 6), quadratic=st.integers(0, 3), data=st.data())
def test_rows_fit_and_have_each_sample_once(
    count: int, rows: int, quadratic: int, data: st.DataObject
) -> None:
    """Also where all samples are as long as a row, and where broken ones were left out."""
    size = st.integers(1, LONGEST)
    lengths = data.draw(st.lists(size, min_size=count, max_size=count * rows))
    cost = RowCost(2, quadratic)
    found = packed(lengths, count, rows * LONGEST, LONGEST, cost)
    assert len(found) == count
    assert sorted(at for each in found for row in each for at in row) == list(range(len(lengths)))
    tokens = [[sum(lengths[at] for at in row) for row in each] for each in found]
    assert all(0 < length <= LONGEST for each in tokens for length in each)
    assert all(len(each) * max(each) <= rows * LONGEST for each in tokens)
    groups = grouped(lengths, count, rows * LONGEST, cost)
    assert max(cost.of(len(each), max(each)) for each in tokens) <= max(
        cost.of(len(group), lengths[group[0]]) for group in groups
    )


def test_longest_goes_to_the_shortest_row() -> None:
    assert packed([2, 6, 3, 5, 1, 4], 2, 36, 12, RowCost()) == [[[1, 2, 0]], [[3, 5, 4]]]


def test_attention_makes_rows_shorter() -> None:
    assert packed([4] * 4, 1, 64, 16, RowCost(1, 0)) == [[[0, 1, 2, 3]]]
    assert packed([4] * 4, 1, 64, 16, RowCost(1, 1)) == [[[0], [1], [2], [3]]]


def test_one_sample_in_a_row_if_no_two_fit() -> None:
    assert packed([5, 6, 7, 8], 2, 18, 9, RowCost()) == [[[3], [2]], [[1], [0]]]
