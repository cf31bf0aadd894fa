"""Which layers travel when the same ranks become another mesh: a shorter pipeline of more replicas,
or the reverse.

4 ranks    2 stages x 2 replicas             1 stage x 4 replicas
rank 0     layers 0-3                        layers 0-7       <- 4-7 from rank 2
rank 1     layers 0-3  (replica 1)           layers 0-7       <- 4-7 from rank 3
rank 2     layers 4-7                        layers 0-7       <- 0-3 from rank 0
rank 3     layers 4-7  (replica 1)           layers 0-7       <- 0-3 from rank 1
"""

from __future__ import annotations

from collections.abc import Sequence

from dynmo.balance.partition import Move, Partition

Holders = tuple[tuple[int, ...], ...]
"""Of each layer, the global ranks that hold it."""


def holders(partition: Partition, placement: Sequence[int], replicas: int) -> Holders:
    """placement: the pipeline rank of each stage."""
    owners = (placement[partition.owner(layer)] for layer in range(partition.layers))
    return tuple(tuple(rank * replicas + replica for replica in range(replicas)) for rank in owners)


def transfers(old: Holders, new: Holders) -> tuple[Move, ...]:
    """What must travel, in layer order: who holds a layer already gets nothing, and those who hold
    it take turns in giving it."""
    moves: list[Move] = []
    for layer, (before, after) in enumerate(zip(old, new, strict=True)):
        targets = [rank for rank in after if rank not in before]
        moves += [Move(layer, before[turn % len(before)], target) for turn, target in enumerate(targets)]
    return tuple(moves)
