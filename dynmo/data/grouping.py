"""Samples of a step in microbatches that cost alike.

A microbatch has a row for each sample, padded to its longest. Its seconds grow with the rows, with
their tokens, and through attention with the square of their length:

    cost(rows, length) = rows * length * (linear + quadratic * length)

The samples are sorted by length, so that rows of a microbatch are of similar length. The groups are
the best of those that keep this order: the most expensive is as cheap as can be.

`packed` first puts several samples in a row. The rows are of even length: each sample, the longest
first, goes to the shortest row (longest processing time first). Fewer rows leave less padding.
Shorter rows cost less attention, which computes what a mask hides, too. So several numbers of rows
are tried. One is that of the samples, so no step is dearer than a grouped one.

Groups and rows depend on lengths alone, so any ranks compute the same.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RowCost:
    """What a token of a row costs, in any unit.

    Attributes:
        linear: By itself.
        quadratic: For each token of its row.
    """

    linear: int = 1
    quadratic: int = 0

    def of(self, rows: int, length: int) -> int:
        return rows * length * (self.linear + self.quadratic * length)


def grouped(lengths: Sequence[int], count: int, most_tokens: int, cost: RowCost) -> list[list[int]]:
    """Groups samples into microbatches.

    Args:
        lengths: Tokens of each sample.
        count: Number of groups. None is empty.
        most_tokens: Tokens of a group, padding included, as far as a sample alone has not more.
        cost: What a group costs.

    Returns:
        The numbers of each group's samples. Longer samples come first.
    """
    assert 0 < count <= len(lengths)
    order = sorted(range(len(lengths)), key=lambda at: (-lengths[at], at))
    low, high = 0, cost.of(len(lengths), max(lengths))
    while low < high:
        limit = (low + high) // 2
        if len(_filled(order, lengths, limit, most_tokens, cost)) <= count:
            high = limit
        else:
            low = limit + 1
    groups = _filled(order, lengths, low, most_tokens, cost)
    assert len(groups) <= count, "most_tokens is too small"
    while len(groups) < count:
        at = max(
            (i for i, group in enumerate(groups) if len(group) > 1),
            key=lambda i: (cost.of(len(groups[i]), lengths[groups[i][0]]), -i),
        )
        group = groups[at]
        groups[at : at + 1] = group[: len(group) // 2], group[len(group) // 2 :]
    return groups


def _filled(
    order: Sequence[int], lengths: Sequence[int], limit: int, most_tokens: int, cost: RowCost
) -> list[list[int]]:
    """Returns groups that are filled one after another up to a cost."""
    groups: list[list[int]] = []
    for sample in order:
        if groups:
            rows, longest = len(groups[-1]) + 1, lengths[groups[-1][0]]
            if cost.of(rows, longest) <= limit and rows * longest <= most_tokens:
                groups[-1].append(sample)
                continue
        if cost.of(1, lengths[sample]) > limit:
            return [[]] * (len(order) + 1)  # not even alone
        groups.append([sample])
    return groups


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
