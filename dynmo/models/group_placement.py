"""The replicas that hold each group of a layer's grouped linears. A hot group has several.

    group     0   1   2   3
    holders   0 1  0  1 2  2    so rank 0 holds 0 and 1, rank 1 holds 0 and 2, rank 2 holds 2 and 3

A rank computes the tokens of a group that it holds, for its own tokens. The tokens of the other
ranks go to the holders in turn. A placement follows from counts of tokens and never from times, so
every rank makes the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

from dynmo.errors import PartitionError
from dynmo.kernels.grouped_linear import RowExchange

Holders = tuple[int, ...]
"""Ranks that hold one group, ascending."""


@dataclass(frozen=True)
class GroupPlacement:
    """The ranks that hold each group, ascending, among those that share a layer's groups.

    Raises:
        PartitionError: A group has no holder, or its holders are not ascending ranks.

    Example:
        >>> placement = GroupPlacement(((0, 1), (0,), (1,)), ranks=2)
        >>> placement.held_by(0)
        (0, 1)
    """

    holders: tuple[Holders, ...]
    ranks: int

    def __post_init__(self) -> None:
        for group, ranks in enumerate(self.holders):
            if (
                not ranks
                or list(ranks) != sorted(set(ranks))
                or ranks[0] < 0
                or ranks[-1] >= self.ranks
            ):
                raise PartitionError(
                    f"group {group} is held by {ranks}; "
                    f"give one or more ascending ranks of 0..{self.ranks - 1}"
                )

    @property
    def groups(self) -> int:
        return len(self.holders)

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(group for group, ranks in enumerate(self.holders) if rank in ranks)
            for rank in range(self.ranks)
        )

    def held_by(self, rank: int) -> tuple[int, ...]:
        return self._held[rank]

    def target(self, group: int, source: int) -> int:
        """The rank that computes the tokens of a source for a group.

        That is the source itself if it holds the group. The sources that do not hold it take its
        holders in turn.
        """
        holders = self.holders[group]
        if source in holders:
            return source
        # The sources that do not hold the group are numbered without gaps. Holders therefore share
        # them evenly.
        return holders[(source - bisect_left(holders, source) + group) % len(holders)]


def even_placement(groups: int, ranks: int) -> GroupPlacement:
    """Contiguous groups, as many on every rank, without copies."""
    if ranks < 1 or groups < 1 or groups % ranks:
        raise PartitionError(
            f"{groups} groups do not divide over {ranks} ranks; "
            "choose a number of groups that is a multiple"
        )
    each = groups // ranks
    return GroupPlacement(tuple((group // each,) for group in range(groups)), ranks)


@runtime_checkable
class Spreads(Protocol):
    """A module with grouped linears, whose groups `parallel.expert` spreads over replicas.

    Attributes:
        groups: Number of groups.
    """

    groups: int

    def hold(self, groups: Sequence[int]) -> None:
        """Drops the weights of all other groups."""
        ...

    def spread(self, placement: GroupPlacement, place: int, exchange: RowExchange) -> None:
        """Computes rows where their groups are. Called again for new weights.

        Args:
            placement: The groups that each replica holds.
            place: This replica's place among them. It holds its groups alone (`hold`).
            exchange: Sends rows between the replicas.
        """
        ...
