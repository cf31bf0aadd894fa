"""What a part of a layer offers whose groups of weights may be spread over replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from dynmo.kernels.row_exchange import RowExchange
from dynmo.models.group_placement import GroupPlacement


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
