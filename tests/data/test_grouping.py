"""Samples of a step in microbatches that cost alike."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynmo.data.grouping import RowCost, grouped

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
