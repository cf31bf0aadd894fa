"""Rows computed on another rank. F has an all-to-all, and B the reverse one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor


class RowExchange(Protocol):
    """The ranks that send rows to each other. All of them make the same calls."""

    def counts(self, sent: Sequence[Sequence[int]], taken: Sequence[int]) -> list[list[int]]:
        """Send some numbers to each rank, and return those from each, `taken` of them."""
        ...

    def rows(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Send `sent` rows to each rank, and return `taken` rows of each, in their order."""
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
    """Send rows as `RowExchange.rows` does. The gradients go back the same way."""
    return cast(Tensor, _Exchange.apply(rows, sent, taken, exchange))
