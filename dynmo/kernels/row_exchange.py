"""Rows computed on another rank.

F has an all-to-all, and B the reverse one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class RowExchange(Protocol):
    """The ranks that send rows to each other. All of them make the same calls."""

    def counts(self, sent: Sequence[Sequence[int]], taken: Sequence[int]) -> list[list[int]]:
        """Tell each rank how many rows it will get.

        Args:
            sent: Some numbers for each rank.
            taken: How many numbers come from each rank.

        Returns:
            The numbers from each rank.
        """
        ...

    def rows(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Send rows, and take those of the others.

        Args:
            rows: [sum of `sent`, width], the rows of the first rank first.
            sent: Rows for each rank.
            taken: Rows from each rank.

        Returns:
            [sum of `taken`, width], the rows from the first rank first.
        """
        ...


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], taken: Sequence[int], exchange: RowExchange
    ) -> Tensor:
        ctx.sent, ctx.taken, ctx.exchange = sent, taken, exchange
        return exchange.rows(rows.detach(), sent, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.rows(gradients[0].contiguous(), ctx.taken, ctx.sent), None, None, None


def exchange_rows(
    rows: Tensor, sent: Sequence[int], taken: Sequence[int], exchange: RowExchange
) -> Tensor:
    """Send rows as `RowExchange.rows` does. The gradients go back the same way.

    Args:
        rows: [sum of `sent`, width], the rows of the first rank first.
        sent: Rows for each rank.
        taken: Rows from each rank.
        exchange: The ranks that send rows to each other.

    Returns:
        [sum of `taken`, width], the rows from the first rank first.
    """
    return cast(Tensor, _Exchange.apply(rows, sent, taken, exchange))
