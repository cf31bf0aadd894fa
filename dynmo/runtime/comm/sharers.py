"""The replicas of a stage that share the groups of its grouped linears.

The replicas are neighbours and send each other rows.

    parallel.replicas = 4, parallel.expert = 2         replicas  0 1 | 2 3
                                                   groups    0-3 4-7 | 0-3 4-7

Its messages have a process group of their own. Another thread sums gradients over the replicas
meanwhile, and collectives of one group must be in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from dynmo.runtime.comm.headers import on_wire
from dynmo.runtime.comm.meeting import meeting_of
from dynmo.runtime.comm.world import World


class Sharers:
    """A `dynmo.kernels.row_exchange.RowExchange` between replicas that share groups.

    Args:
        world: This rank's pipeline, one of the mesh. All ranks make their groups together.
        ranks: Replicas that share one set of groups. They divide the replicas.
    """

    def __init__(self, world: World, ranks: int) -> None:
        groups = [
            tuple(range(first, first + ranks)) for first in range(0, world.everyone.size, ranks)
        ]
        self.world = meeting_of(world).view(
            groups, "the replicas that share groups of weights", apart=True
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
            return self.world.exchange(parts, sizes, what)
        # The executor looks at the waits of its pipeline.
        with self._pipeline.waits.around(self.world.device, None, what):
            return self.world.exchange(parts, sizes, what)
