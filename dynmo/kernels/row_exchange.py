"""Rows that are computed on another rank: an all-to-all in F, and the reverse one in B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class RowExchange(Protocol):
    """The ranks that send rows to each other. All of them call each method alike."""

    def counts(self, sent: Sequence[Sequence[int]], taken: Sequence[int]) -> list[list[int]]:
        """Tells each rank how many rows it will get.

        Args:
            sent: By rank, some numbers for it.
            taken: By rank, how many numbers come from it.

        Returns:
            By rank, its numbers.
        """
        ...

    def rows(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Sends rows, and takes those of the others.

        Args:
            rows: [sum of `sent`, width], the rows of the first rank first.
            sent: Rows for each rank.
            taken: Rows from each rank.

        Returns:
            [sum of `taken`, width], those from the first rank first.
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
    """As `RowExchange.rows`. The gradients go back the same way."""
    return cast(Tensor, _Exchange.apply(rows, sent, taken, exchange))
