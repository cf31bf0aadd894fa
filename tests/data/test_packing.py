"""Samples of a step in packed rows, in microbatches that cost alike."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynmo.data.grouping import RowCost, grouped
from dynmo.data.packing import packed

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
