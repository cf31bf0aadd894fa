"""Samples of a step packed into rows, several in a row, in microbatches that cost alike.

The rows are of even length: each sample, the longest first, goes to the shortest row (longest
processing time first). The rows become microbatches as samples do in `grouping.py`. Fewer rows
leave less padding. Shorter rows cost less attention, which computes what a mask hides, too. So
several numbers of rows are tried. One is that of the samples, so no step is dearer than a grouped
one. All this depends on lengths alone, so any ranks compute the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dynmo.data.grouping import RowCost, grouped

Rows = list[list[int]]
"""The numbers of the samples of each row."""

# Numbers of rows that are tried.
_TRIED = 16


def packed(
    lengths: Sequence[int], count: int, most_tokens: int, row_tokens: int, cost: RowCost
) -> list[Rows]:
    """Packs samples into the rows of microbatches.

    Args:
        lengths: Tokens of each sample, at most `row_tokens`.
        count: Number of microbatches. None is empty.
        most_tokens: Tokens of a microbatch, padding included.
        row_tokens: Tokens of a row.
        cost: What a microbatch costs.

    Returns:
        The rows of each microbatch. Longer rows come first.
    """
    # So each number of rows fits.
    assert max(lengths) <= row_tokens
    assert len(lengths) * row_tokens <= count * most_tokens
    step = max(count, len(lengths) // _TRIED)
    choices: list[tuple[tuple[int, int], list[Rows]]] = []
    for number in (*range(count, len(lengths), step), len(lengths)):
        rows = _even(lengths, number)
        tokens = [sum(lengths[at] for at in row) for row in rows]
        if max(tokens) <= row_tokens:
            groups = grouped(tokens, count, most_tokens, cost)
            costs = [cost.of(len(group), tokens[group[0]]) for group in groups]
            microbatches = [[rows[at] for at in group] for group in groups]
            choices.append(((max(costs), sum(costs)), microbatches))
    return min(choices, key=lambda choice: choice[0])[1]


def _even(lengths: Sequence[int], number: int) -> Rows:
    """Returns so many rows. None is empty if there are as many samples."""
    rows: Rows = [[] for _ in range(number)]
    shortest = [(0, row) for row in range(number)]
    for sample in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        tokens, row = shortest[0]
        rows[row].append(sample)
        heapq.heapreplace(shortest, (tokens + lengths[sample], row))
    return rows
