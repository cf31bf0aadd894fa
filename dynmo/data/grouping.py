"""Samples of a step in microbatches that cost alike.

A microbatch has a row for each sample, padded to its longest. Its seconds grow with the rows, with
their tokens, and through attention with the square of their length:

    cost(rows, length) = rows * length * (linear + quadratic * length)

The samples are sorted by length, so that rows of a microbatch are of similar length. The groups are
the best of those that keep this order: the most expensive is as cheap as can be. They depend on
lengths alone, so any ranks compute the same.
"""

from __future__ import annotations

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
