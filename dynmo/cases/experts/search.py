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

from collections.abc import Callable, Iterator, Sequence
from functools import cache

from dynmo.extend import GroupPlacement

Holders = tuple[int, ...]
"""Ranks that hold one expert, ascending."""
Counts = Sequence[Sequence[float]]
"""counts[source][expert]: how many tokens of rank `source` chose `expert`."""

NewHolders = tuple[tuple[int, Holders], ...]
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

    Example:
        >>> place_experts([[8, 1, 1, 2], [8, 1, 1, 2]], ranks=2, per_rank=3).holders
        ((0, 1), (0,), (0,), (1,))
    """
    enough = (1 + _NEAR) * load_bound(counts, ranks, per_rank)
    anew = _from_scratch(counts, ranks, per_rank, enough)
    if current is None:
        return anew
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
    experts = len(counts[0])
    totals = _totals(counts)
    copies = _copies(totals, ranks, ranks * per_rank)
    hottest = max(total / count for total, count in zip(totals, copies, strict=True))
    if ranks * per_rank == experts:
        hottest += sum(sorted(totals)[: per_rank - 1])
    return max(sum(totals) / ranks, hottest, max(map(max, counts)))


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
    """Makes the change that relieves the busiest rank most, until none does."""
    holders, loads = list(placement.holders), loads_of(placement, counts)
    tokens = list(zip(*counts, strict=True))
    shares = cache(lambda expert, ranks: tokens_by_holder(ranks, expert, tokens[expert]))

    def after(change: NewHolders, limit: float) -> dict[int, float] | None:
        """The loads of the ranks concerned. None if one reaches the limit."""
        new: dict[int, float] = {}
        for expert, ranks in change:
            for rank, share in shares(expert, holders[expert]).items():
                new[rank] = new.get(rank, loads[rank]) - share
            for rank, share in shares(expert, ranks).items():
                new[rank] = new.get(rank, loads[rank]) + share
        return new if max(new.values()) < limit else None

    for _ in range(_MOST_IMPROVEMENTS * placement.ranks * per_rank):
        least = max(loads)
        busiest, best = loads.index(least), None
        if least <= enough:
            break
        for change in _changes(holders, loads, busiest, per_rank, shares):
            new = after(change, least)
            if new is not None:
                least, best = max(new.values()), (change, new)
        if best is None:
            break
        for expert, ranks in best[0]:
            holders[expert] = ranks
        for rank, load in best[1].items():
            loads[rank] = load
    return GroupPlacement(tuple(holders), placement.ranks)


def _changes(
    holders: Sequence[Holders],
    loads: Sequence[float],
    busiest: int,
    per_rank: int,
    shares: Callable[[int, Holders], dict[int, float]],
) -> Iterator[NewHolders]:
    """Moves, copies and swaps of the experts of the busiest rank.

    Another expert makes room if its holder is full.
    """
    held = [[e for e, ranks in enumerate(holders) if rank in ranks] for rank in range(len(loads))]
    only = len(held[busiest]) == 1  # it stays, unless another expert comes
    for expert in held[busiest]:
        if not shares(expert, holders[expert])[busiest]:
            continue
        others = _without(holders[expert], busiest)
        if others and not only:
            yield ((expert, others),)
        for target in range(len(loads)):
            if target in holders[expert] or loads[target] >= loads[busiest]:
                continue
            moved, copied = _with(others, target), _with(holders[expert], target)
            to = (copied,) if only else (copied, moved)
            if len(held[target]) < per_rank:
                yield from (((expert, ranks),) for ranks in to)
                continue
            comes = min(shares(expert, ranks)[target] for ranks in (copied, moved))
            for other in held[target]:
                leaves = shares(other, holders[other])[target]
                if loads[target] + comes - leaves >= loads[busiest]:
                    continue
                rest = _without(holders[other], target)
                if rest:
                    yield from (((expert, ranks), (other, rest)) for ranks in to)
                if busiest not in holders[other]:
                    yield (expert, moved), (other, _with(rest, busiest))


def _without(ranks: Holders, rank: int) -> Holders:
    return tuple(other for other in ranks if other != rank)


def _with(ranks: Holders, rank: int) -> Holders:
    return tuple(sorted((*ranks, rank)))


def loads_of(placement: GroupPlacement, counts: Counts) -> list[float]:
    """The tokens that each rank computes.

    Example:
        >>> loads_of(GroupPlacement(((0, 1), (0,), (1,)), ranks=2), [[4, 2, 1], [4, 0, 3]])
        [6, 8]
    """
    loads: list[float] = [0] * placement.ranks
    for expert, (holders, tokens) in enumerate(
        zip(placement.holders, zip(*counts, strict=True), strict=True)
    ):
        for rank, share in tokens_by_holder(holders, expert, tokens).items():
            loads[rank] += share
    return loads


def tokens_by_holder(holders: Holders, expert: int, tokens: Sequence[float]) -> dict[int, float]:
    """Divides the tokens of an expert among its holders, as `GroupPlacement.target` does."""
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
    pairs = enumerate(zip(old.holders, new.holders, strict=True))
    return tuple(
        (expert, rank) for expert, (before, after) in pairs for rank in after if rank not in before
    )
