"""The mesh: pipelines of equal placement that train side by side (replicas).

Each replica trains on different microbatches.

    8 ranks, 2 replicas         pipeline rank   0      1      2      3
                                 replica 0    rank 0 rank 2 rank 4 rank 6
                                 replica 1    rank 1 rank 3 rank 5 rank 7

    row      a pipeline: activations, and gradients of inputs
    column   peers, which hold the same layers: gradients of weights are summed

    global rank = pipeline rank * replicas + replica

Peers are neighbours. They exchange all gradients of a step, which is more than the messages between
stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from dynmo.runtime.comm.headers import on_wire
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.rank_group import RankGroup


def arrange(world: RankGroup, replicas: int) -> RankGroup:
    """Returns this rank's pipeline in a mesh of `replicas` replicas over all ranks.

    All ranks call it. They may call it again for another shape once nothing is under way. `peers`
    and `everyone` of the pipeline lead to the other ranks.
    """
    everyone = meeting_of(world)
    assert everyone.size % replicas == 0, "a pipeline's ranks times its replicas are all ranks"
    everyone.shape = replicas
    if replicas == 1:
        return everyone
    pipelines = [tuple(range(replica, everyone.size, replicas)) for replica in range(replicas)]
    positions = [
        tuple(range(first, first + replicas)) for first in range(0, everyone.size, replicas)
    ]
    what = f"the groups of {replicas} replicas"
    return everyone.view(pipelines, what).with_peers(everyone.view(positions, what))


class FirstReplica:
    """Sums over the ranks of the first replica, for values that must be alike."""

    def __init__(self, world: RankGroup) -> None:
        self._world = world

    def sum(self, tensor: Tensor, what: str) -> Tensor:
        """Adds a tensor up like `RankGroup.sum`. It is set to zero on other replicas."""
        return self._world.everyone.sum(tensor.zero_() if self._world.replica else tensor, what)

    def sum_all(self, tensor: Tensor, what: str) -> Tensor:
        """Adds a tensor up over all replicas, each of which has its own microbatches."""
        return self._world.everyone.sum(tensor, what)


class Sharers:
    """A `dynmo.kernels.grouped_linear.RowExchange` between replicas that share groups.

    They are neighbours and send each other rows of grouped linears.

        parallel.replicas = 4, parallel.expert = 2         replicas  0 1 | 2 3
                                                       groups    0-3 4-7 | 0-3 4-7

    Its messages have a process group of their own. Another thread sums gradients over the replicas
    meanwhile, and collectives of one group must be in one order.

    Args:
        world: This rank's pipeline, one of the mesh. All ranks make their groups together.
        ranks: Replicas that share one set of groups. They divide the replicas.
    """

    def __init__(self, world: RankGroup, ranks: int) -> None:
        groups = [
            tuple(range(first, first + ranks)) for first in range(0, world.everyone.size, ranks)
        ]
        self.world = meeting_of(world).view(
            groups, "the replicas that share groups of weights", own_group=True
        )
        self._pipeline = world
        self.place, self.ranks = self.world.rank, ranks
        self.number = world.replica // ranks

    def counts(self, sent: Sequence[Sequence[int]], taken: Sequence[int]) -> list[list[int]]:
        parts = torch.tensor(list(chain(*sent)), device=self.world.device).split(
            [len(each) for each in sent]
        )
        arrived = self._exchange(parts, taken, "the numbers of rows for the weights here")
        numbers: list[int] = torch.cat(arrived).tolist()
        rest = iter(numbers)
        return [[next(rest) for _ in range(count)] for count in taken]

    def rows(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        flat, each = on_wire(rows).reshape(-1), rows.shape[1] * rows.element_size()
        width = each // flat.element_size()
        parts = flat.split([count * width for count in sent])
        arrived = torch.cat(
            self._exchange(parts, [count * width for count in taken], "rows for the weights here")
        )
        return arrived.view(rows.dtype).view(-1, rows.shape[1])

    def _exchange(self, parts: Sequence[Tensor], sizes: Sequence[int], what: str) -> list[Tensor]:
        if not self.world.enqueues:
            return self.world.exchange([[part] for part in parts], sizes, what)
        # The executor looks at the waits of its pipeline.
        with self._pipeline.waits.around(self.world.device, None, what):
            return self.world.exchange([[part] for part in parts], sizes, what)
