"""Finds a placement of experts for given counts of tokens.

Hot experts get copies.

    1. copies    the expert with the largest load per copy gets the next redundant place, as in
                 DeepSeek's EPLB
    2. pack      copies from the largest, each on the least loaded rank that has a place left and
                 does not hold the expert (longest processing time first)
    3. improve   moves, swaps and copies that lower the most loaded rank, by the exact loads, until
                 none helps or the largest load is within 1 % of its bound

The result depends on the counts alone. Ties are broken by index, and the search ends by itself:
each improvement lowers the loads, sorted from the largest, lexicographically.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

from dynmo.balance.group_placement import GroupPlacement, Holders
from dynmo.errors import PartitionError

Counts = Sequence[Sequence[float]]
"""counts[source][expert]: how many tokens of rank `source` chose `expert`."""

Change = tuple[tuple[int, Holders], ...]
"""New holders of one or two experts."""

_MOST_IMPROVEMENTS = 4  # for each place of the group
_STARTS = 4  # numbers of copies to try, beside none
_NEAR = 0.01  # the search ends within this share above the bound


def place_experts(
    counts: Counts,
    ranks: int,
    per_rank: int,
    current: GroupPlacement | None = None,
    least_gain: float = 0.05,
) -> GroupPlacement:
    """Places experts so that the most loaded rank computes few tokens.

    The search starts twice: anew, and from `current`. The second start moves fewer experts. Its
    result is preferred unless the first one is better by `least_gain`. If there are as many experts
    as ranks or more, every rank holds one at least.

    Args:
        counts: Tokens by source and expert.
        ranks: Number of ranks of the group.
        per_rank: Most experts that a rank can hold. Places beyond one for each expert serve copies.
        current: The placement now.
        least_gain: `current` stays unless the largest load falls by more than this share.

    Raises:
        PartitionError: The experts do not fit the ranks, the counts are not one row for each rank,
            or `current` is of another group.

    Example:
        >>> place_experts([[8, 1, 1, 2], [8, 1, 1, 2]], ranks=2, per_rank=3).holders
        ((0, 1), (0,), (0,), (1,))
    """
    experts = len(counts[0]) if counts else 0
    _check(counts, ranks, per_rank, experts)
    enough = (1 + _NEAR) * load_bound(counts, ranks, per_rank)
    anew = _from_scratch(counts, ranks, per_rank, enough)
    if current is None:
        return anew
    if (current.groups, current.ranks) != (experts, ranks):
        raise PartitionError(
            f"a placement of {current.groups} experts on {current.ranks} ranks cannot go on "
            f"with {experts} on {ranks}; begin anew"
        )
    for rank in range(ranks):
        if len(current.held_by(rank)) > per_rank:
            raise PartitionError(
                f"rank {rank} holds {len(current.held_by(rank))} experts, more than {per_rank}; "
                "begin anew"
            )
    near = _improve(counts, current, per_rank, enough)
    largest, by_near, by_current = (max(loads_of(x, counts)) for x in (anew, near, current))
    share = 1 - least_gain
    if largest >= share * by_near and len(expert_moves(current, near)) <= len(
        expert_moves(current, anew)
    ):
        anew, largest = near, by_near
    return current if largest >= share * by_current else anew


def load_bound(counts: Counts, ranks: int, per_rank: int) -> float:
    """A lower bound of the largest load of any placement, in tokens.

    Three loads bound it. The first is the mean load. The second is the load of the hottest copy,
    if the copies of an expert share its load evenly. The third is the tokens of one source for one
    expert. Without room for copies, the hottest expert with the coldest beside it bounds it too.
    """
    experts = len(counts[0]) if counts else 0
    _check(counts, ranks, per_rank, experts)
    totals = _totals(counts)
    copies = _copies(totals, ranks, ranks * per_rank)
    hottest = max(total / count for total, count in zip(totals, copies, strict=True))
    if ranks * per_rank == experts:
        hottest += sum(sorted(totals)[: per_rank - 1])
    return max(sum(totals) / ranks, hottest, max(map(max, counts)))


def _check(counts: Counts, ranks: int, per_rank: int, experts: int) -> None:
    if not 1 <= experts <= ranks * per_rank:
        raise PartitionError(
            f"{experts} experts do not fit {ranks} ranks of {per_rank} experts each; "
            "let each rank hold more"
        )
    check_counts(counts, ranks, experts)


def _totals(counts: Counts) -> list[float]:
    return [sum(column) for column in zip(*counts, strict=True)]


def _from_scratch(counts: Counts, ranks: int, per_rank: int, enough: float) -> GroupPlacement:
    """Packs and improves for several numbers of copies.

    More copies make even loads easier, but leave less room for changes.
    """
    experts = len(counts[0])
    redundant, least = ranks * per_rank - experts, float("inf")
    best = None
    for more in dict.fromkeys(redundant * part // _STARTS for part in range(_STARTS, -1, -1)):
        placement = _improve(
            counts, _pack(counts, ranks, per_rank, experts + more), per_rank, enough
        )
        largest = max(loads_of(placement, counts))
        if largest < least:
            best, least = placement, largest
        if least <= enough:
            break
    assert best is not None
    return best


def _copies(totals: list[float], ranks: int, places: int) -> list[int]:
    """Number of copies of each expert. An expert without tokens gets one."""
    copies = [1] * len(totals)
    for _ in range(places - len(totals)):
        more = [expert for expert, total in enumerate(totals) if copies[expert] < ranks and total]
        if not more:
            break
        copies[max(more, key=lambda expert: totals[expert] / copies[expert])] += 1
    return copies


def _pack(counts: Counts, ranks: int, per_rank: int, places: int) -> GroupPlacement:
    experts = range(len(counts[0]))
    totals = _totals(counts)
    copies = _copies(totals, ranks, places)
    load, held = [0.0] * ranks, [set[int]() for _ in range(ranks)]
    for expert in sorted(experts, key=lambda expert: (-totals[expert] / copies[expert], expert)):
        for copy in range(copies[expert]):
            free = [
                rank
                for rank in range(ranks)
                if len(held[rank]) < per_rank and expert not in held[rank]
            ]
            # There are as many places left as copies, so a first copy always has one.
            if not free:
                assert copy
                break
            rank = min(free, key=lambda rank: (load[rank], len(held[rank])))
            load[rank] += totals[expert] / copies[expert]
            held[rank].add(expert)
    return GroupPlacement(
        tuple(tuple(rank for rank in range(ranks) if expert in held[rank]) for expert in experts),
        ranks,
    )


def _improve(
    counts: Counts, placement: GroupPlacement, per_rank: int, enough: float
) -> GroupPlacement:
    search = _Search(counts, placement, per_rank)
    for _ in range(_MOST_IMPROVEMENTS * placement.ranks * per_rank):
        if max(search.loads) <= enough or not search.improve():
            break
    return GroupPlacement(tuple(search.holders), placement.ranks)


@final
class _Search:
    def __init__(self, counts: Counts, placement: GroupPlacement, per_rank: int) -> None:
        self.per_rank, self.ranks = per_rank, placement.ranks
        self.holders = list(placement.holders)
        self.held = [set(placement.held_by(rank)) for rank in range(self.ranks)]
        self._tokens = [[row[expert] for row in counts] for expert in range(placement.groups)]
        self._totals = [sum(tokens) for tokens in self._tokens]
        self._known: dict[tuple[int, Holders], dict[int, float]] = {}
        self.loads = loads_of(placement, counts)

    def improve(self) -> bool:
        """Makes the change after which the largest load of the ranks concerned is least."""
        busiest = max(range(self.ranks), key=lambda rank: self.loads[rank])
        least, best = self.loads[busiest], None
        for at_least, change in self._changes(busiest):
            if at_least < least and (largest := self._largest(change, busiest, least)) < least:
                least, best = largest, change
        if best is None:
            return False
        for rank, load in self._after(best).items():
            self.loads[rank] = load
        for expert, ranks in best:
            for rank in self.holders[expert]:
                self.held[rank].discard(expert)
            for rank in ranks:
                self.held[rank].add(expert)
            self.holders[expert] = ranks
        return True

    def _changes(self, busiest: int) -> Iterator[tuple[float, Change]]:
        """Changes that could relieve the busiest rank, with the load of the rank that gains.

        A change is a move, a copy or a swap of one of its experts. Another expert makes room if its
        holder is full.
        """
        only = len(self.held[busiest]) == 1  # it stays, unless another expert comes
        leaving: dict[int, list[tuple[int, Holders, Holders, float]]] = {}
        for expert in sorted(self.held[busiest]):
            ranks = self.holders[expert]
            if not self.shares(expert, ranks)[busiest]:
                continue
            others = tuple(rank for rank in ranks if rank != busiest)
            if others and not only:
                yield 0, ((expert, others),)
            for target in range(self.ranks):
                load = self.loads[target]
                if target in ranks or load >= self.loads[busiest]:
                    continue
                moved, copied = _with(others, target), _with(ranks, target)
                by_move, by_copy = (load + self.shares(expert, x)[target] for x in (moved, copied))
                if len(self.held[target]) < self.per_rank:
                    yield by_copy, ((expert, copied),)
                    if not only:
                        yield by_move, ((expert, moved),)
                    continue
                if target not in leaving:
                    leaving[target] = self._leaving(target)
                for other, held_by, rest, leaves in leaving[target]:
                    if rest:
                        yield by_copy - leaves, ((expert, copied), (other, rest))
                        if not only:
                            yield by_move - leaves, ((expert, moved), (other, rest))
                    if busiest not in held_by:
                        yield by_move - leaves, ((expert, moved), (other, _with(rest, busiest)))

    def _leaving(self, rank: int) -> list[tuple[int, Holders, Holders, float]]:
        """The experts of a rank, with their holders, the other holders, and their load there."""
        return [
            (
                expert,
                self.holders[expert],
                tuple(other for other in self.holders[expert] if other != rank),
                self.shares(expert, self.holders[expert])[rank],
            )
            for expert in sorted(self.held[rank])
        ]

    def _largest(self, change: Change, busiest: int, limit: float) -> float:
        """The largest load of the ranks that the change concerns."""
        (expert, ranks), *rest = change
        # Most changes are swaps of experts that have one holder each.
        if rest and len(ranks) == 1 == len(rest[0][1]) == len(self.holders[rest[0][0]]) == len(
            self.holders[expert]
        ):
            shift = self._totals[expert] - self._totals[rest[0][0]]
            return max(self.loads[busiest] - shift, self.loads[ranks[0]] + shift)
        after = self._after(change)
        return max(after.values()) if busiest in after else limit

    def _after(self, change: Change) -> dict[int, float]:
        after: dict[int, float] = {}
        for expert, ranks in change:
            for rank, tokens in self.shares(expert, self.holders[expert]).items():
                after[rank] = after.get(rank, self.loads[rank]) - tokens
            for rank, tokens in self.shares(expert, ranks).items():
                after[rank] = after.get(rank, self.loads[rank]) + tokens
        return after

    def shares(self, expert: int, ranks: Holders) -> dict[int, float]:
        known = self._known.get((expert, ranks))
        if known is None:
            known = self._known[expert, ranks] = tokens_by_holder(
                ranks, expert, self._tokens[expert]
            )
        return known


def _with(ranks: Holders, rank: int) -> Holders:
    return tuple(sorted((*ranks, rank)))


def loads_of(placement: GroupPlacement, counts: Counts) -> list[float]:
    """The tokens that each rank computes.

    Example:
        >>> loads_of(GroupPlacement(((0, 1), (0,), (1,)), ranks=2), [[4, 2, 1], [4, 0, 3]])
        [6, 8]
    """
    check_counts(counts, placement.ranks, placement.groups)
    loads: list[float] = [0] * placement.ranks
    for expert, (holders, tokens) in enumerate(
        zip(placement.holders, zip(*counts, strict=True), strict=True)
    ):
        for rank, share in tokens_by_holder(holders, expert, tokens).items():
            loads[rank] += share
    return loads


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


def expert_moves(old: GroupPlacement, new: GroupPlacement) -> tuple[tuple[int, int], ...]:
    """(expert, rank) for each expert that a rank holds only in the new placement."""
    if (old.groups, old.ranks) != (new.groups, new.ranks):
        raise PartitionError(
            f"{old.groups} experts on {old.ranks} ranks cannot become {new.groups} on "
            f"{new.ranks}; keep the experts and the ranks"
        )
    pairs = enumerate(zip(old.holders, new.holders, strict=True))
    return tuple(
        (expert, rank) for expert, (before, after) in pairs for rank in after if rank not in before
    )


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
