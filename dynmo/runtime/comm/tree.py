"""Collectives in as many rounds as a tree of the ranks is deep, for small tensors.

    8 ranks    round 0: 01 23 45 67    round 1: 02 13 46 57    round 2: 04 15 26 37
    9 ranks    rank 8 first hands what it has to rank 0, and takes the result from it at the end

The two ranks of a pair send each other all that they know. gloo's own all-reduce passes parts
around a ring of n ranks, so 2 (n - 1) of its messages wait for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

FEW = 4
"""Ranks up to which gloo's ring takes no longer. Its threads wake one another less often."""
MOST = 1 << 18
"""Bytes of the largest tensor. A ring sends fewer bytes, which counts for more in a larger one."""


class Tree:
    """The collectives of some ranks. Each rank calls them in the same order.

    Args:
        ranks: The ranks that take part, as `group` numbers them.
        place: This rank's position among them.
        tag: Tag of all messages. No other messages between these ranks have it.
        limit: Limit of each wait.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int],
        place: int,
        tag: int,
        limit: timedelta,
    ) -> None:
        self._group, self._ranks, self._place = group, ranks, place
        self._tag, self._limit = tag, limit
        # The ranks from here on are guests of the first ones.
        self._inner = 1 << (len(ranks).bit_length() - 1)

    def sum(self, tensor: Tensor) -> None:
        """Adds a contiguous CPU tensor up, in place. Each rank adds in an order of its own."""
        self._reduce(tensor, torch.Tensor.add_)

    def largest(self, tensor: Tensor) -> None:
        self._reduce(tensor, lambda own, other: torch.maximum(own, other, out=own))

    def _reduce(self, tensor: Tensor, combine: Callable[[Tensor, Tensor], object]) -> None:
        other = torch.empty_like(tensor)
        if self._is_guest:
            self._swap(self._partner, [tensor], [])
            self._swap(self._partner, [], [tensor])
            return
        if self._has_guest:
            self._swap(self._partner, [], [other])
            combine(tensor, other)
        for distance in self._distances():
            self._swap(self._place ^ distance, [tensor], [other])
            combine(tensor, other)
        if self._has_guest:
            self._swap(self._partner, [tensor], [])

    def gather(self, table: Tensor) -> None:
        """Fills in the other ranks' rows of a contiguous CPU tensor."""

        def block(start: int, rows: int) -> list[Tensor]:
            """The rows of neighbours, and those of their guests."""
            both = (table[first : first + rows] for first in (start, start + self._inner))
            return [part for part in both if len(part)]

        row = table[self._place]
        if self._is_guest:
            self._swap(self._partner, [row], [])
            self._swap(self._partner, [], [table])
            return
        if self._has_guest:
            self._swap(self._partner, [], [table[self._partner]])
        for distance in self._distances():
            start = self._place - self._place % distance
            sent, taken = block(start, distance), block(start ^ distance, distance)
            self._swap(self._place ^ distance, sent, taken)
        if self._has_guest:
            self._swap(self._partner, [table], [])

    @property
    def _partner(self) -> int:
        return self._place ^ self._inner

    @property
    def _is_guest(self) -> bool:
        return self._place >= self._inner

    @property
    def _has_guest(self) -> bool:
        return not self._is_guest and self._partner < len(self._ranks)

    def _distances(self) -> Iterator[int]:
        distance = 1
        while distance < self._inner:
            yield distance
            distance *= 2

    def _swap(self, place: int, sent: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        peer = self._ranks[place]
        works = [self._group.recv([each], peer, self._tag) for each in taken]
        works += [self._group.send([each], peer, self._tag) for each in sent]
        for work in works:
            work.wait(self._limit)
