"""Lists the layers that travel when the same ranks become another mesh.

It may be a shorter pipeline of more replicas, or the reverse.

    4 ranks    2 stages x 2 replicas             1 stage x 4 replicas
    rank 0     layers 0-3                        layers 0-7       <- 4-7 from rank 2
    rank 1     layers 0-3  (replica 1)           layers 0-7       <- 4-7 from rank 3
    rank 2     layers 4-7                        layers 0-7       <- 0-3 from rank 0
    rank 3     layers 4-7  (replica 1)           layers 0-7       <- 0-3 from rank 1
"""

from __future__ import annotations

from collections.abc import Sequence

from dynmo.plan.partition import Move, Partition

Holders = tuple[tuple[int, ...], ...]
"""Global ranks that hold each layer."""


def holders(partition: Partition, stage_ranks: Sequence[int], replicas: int) -> Holders:
    """Returns the global ranks that hold each layer."""
    owners = (stage_ranks[partition.owner(layer)] for layer in range(partition.layers))
    return tuple(tuple(rank * replicas + replica for replica in range(replicas)) for rank in owners)


def transfers(old: Holders, new: Holders, within_replicas: bool = False) -> tuple[Move, ...]:
    """Lists the moves, in layer order. A rank that already holds a layer gets nothing.

    Args:
        within_replicas: Whether each replica's part of a layer goes to the same replica of the new
            mesh, which has as many. If not, the holders of a layer take turns in giving it.
    """
    moves: list[Move] = []
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        if within_replicas:
            moves += [
                Move(layer, *pair) for pair in zip(before, after, strict=True) if pair[0] != pair[1]
            ]
            continue
        have = frozenset(before)
        targets = [rank for rank in after if rank not in have]
        moves += [
            Move(layer, before[turn % len(before)], target) for turn, target in enumerate(targets)
        ]
    return tuple(moves)
