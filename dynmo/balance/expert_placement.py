"""The ranks that hold the experts of a layer, with hot experts on several ranks.

    expert     0   1   2   3
    holders   0 1  0  1 2  2    so rank 0 holds 0 and 1, rank 1 holds 0 and 2, rank 2 holds 2 and 3

A rank computes the tokens of an expert that it holds, for its own tokens. The tokens of the other
ranks go to the holders in turn. A placement follows from counts of tokens and never from times, so
every rank makes the same one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dynmo.errors import PartitionError

Counts = Sequence[Sequence[float]]
"""counts[source][expert]: how many tokens of rank `source` chose `expert`."""

Holders = tuple[int, ...]
"""Ranks of the group that hold one expert, ascending."""


@dataclass(frozen=True)
class ExpertPlacement:
    """The ranks of an expert-parallel group that hold each expert, ascending.

    Raises:
        PartitionError: An expert has no holder, or its holders are not ascending ranks of the
            group.

    Example:
        >>> placement = ExpertPlacement(((0, 1), (0,), (1,)), ranks=2)
        >>> placement.held_by(0)
        (0, 1)
        >>> placement.loads([[4, 2, 1], [4, 0, 3]])
        [6, 8]
    """

    holders: tuple[Holders, ...]
    ranks: int

    def __post_init__(self) -> None:
        for expert, ranks in enumerate(self.holders):
            if (
                not ranks
                or list(ranks) != sorted(set(ranks))
                or ranks[0] < 0
                or ranks[-1] >= self.ranks
            ):
                raise PartitionError(
                    f"expert {expert} is held by {ranks}; "
                    f"give one or more ascending ranks of 0..{self.ranks - 1}"
                )

    @property
    def experts(self) -> int:
        return len(self.holders)

    @cached_property
    def _held(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(expert for expert, ranks in enumerate(self.holders) if rank in ranks)
            for rank in range(self.ranks)
        )

    def held_by(self, rank: int) -> tuple[int, ...]:
        return self._held[rank]

    def target(self, expert: int, source: int) -> int:
        """The rank that computes the tokens of a source for an expert.

        That is the source itself if it holds the expert. The sources that do not hold it take its
        holders in turn.
        """
        return target_of(self.holders[expert], expert, source)

    def loads(self, counts: Counts) -> list[float]:
        """The tokens that each rank computes."""
        check_counts(counts, self.ranks, self.experts)
        loads: list[float] = [0] * self.ranks
        for expert, (holders, tokens) in enumerate(
            zip(self.holders, zip(*counts, strict=True), strict=True)
        ):
            for rank, share in tokens_by_holder(holders, expert, tokens).items():
                loads[rank] += share
        return loads


def target_of(holders: Holders, expert: int, source: int) -> int:
    """`ExpertPlacement.target` of an expert with these holders."""
    below = bisect_left(holders, source)
    if below < len(holders) and holders[below] == source:
        return source
    # The sources that do not hold the expert are numbered without gaps. Holders therefore share
    # them evenly.
    return holders[(source - below + expert) % len(holders)]


def tokens_by_holder(holders: Holders, expert: int, tokens: Sequence[float]) -> dict[int, float]:
    """Divides the tokens of an expert among its holders, as `target_of` does."""
    if len(holders) == 1:
        return {holders[0]: sum(tokens)}
    shares: dict[int, float] = {rank: tokens[rank] for rank in holders}
    others = [count for source, count in enumerate(tokens) if source not in shares]
    copies = len(holders)
    first = expert % copies
    for turn, rank in enumerate((*holders[first:], *holders[:first])):
        shares[rank] += sum(others[turn::copies])
    return shares


def expert_moves(old: ExpertPlacement, new: ExpertPlacement) -> tuple[tuple[int, int], ...]:
    """(expert, rank) for each expert that a rank holds only in the new placement."""
    if (old.experts, old.ranks) != (new.experts, new.ranks):
        raise PartitionError(
            f"{old.experts} experts on {old.ranks} ranks cannot become {new.experts} on "
            f"{new.ranks}; keep the experts and the ranks"
        )
    pairs = enumerate(zip(old.holders, new.holders, strict=True))
    return tuple(
        (expert, rank) for expert, (before, after) in pairs for rank in after if rank not in before
    )


def even_placement(experts: int, ranks: int) -> ExpertPlacement:
    """Contiguous experts, as many on every rank, without copies."""
    if ranks < 1 or experts < 1 or experts % ranks:
        raise PartitionError(
            f"{experts} experts do not divide over {ranks} ranks; "
            "choose a number of experts that is a multiple"
        )
    each = experts // ranks
    return ExpertPlacement(tuple((expert // each,) for expert in range(experts)), ranks)


def check_counts(counts: Counts, ranks: int, experts: int) -> None:
    """Checks that there is one row for each rank with one count for each expert."""
    if len(counts) != ranks:
        raise PartitionError(
            f"counts of tokens from {len(counts)} sources for {ranks} ranks; give one row per rank"
        )
    for source, row in enumerate(counts):
        if len(row) != experts:
            raise PartitionError(
                f"rank {source} counts {len(row)} experts, but there are {experts}; "
                "give one count per expert"
            )
        if min(row) < 0 or not sum(row) < float("inf"):
            raise PartitionError(
                f"a count of tokens of rank {source} is negative or not finite; "
                "give counts of 0 or more"
            )
