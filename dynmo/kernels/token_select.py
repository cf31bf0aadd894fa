"""Taking tokens out of a residual stream, and putting streams together.

Plain indexing would fill the gradient with zeros and add to it. These write it once.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(index)
        return x.view_as(x), x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        stream, selected = gradients
        return stream.index_add(0, index, selected), None


def select(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return x, and its rows `index`, int64 without repetitions."""
    return cast("tuple[Tensor, Tensor]", _Select.apply(x, index))


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Tensor, at_first: Tensor, second: Tensor, at_second: Tensor
    ) -> Tensor:
        ctx.save_for_backward(at_first, at_second)
        out = first.new_empty(first.shape[0] + second.shape[0], first.shape[1])
        out.index_copy_(0, at_first, first)
        return out.index_copy_(0, at_second, second)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, Tensor, None]:
        at_first, at_second = ctx.saved_tensors
        return (
            gradients[0].index_select(0, at_first),
            None,
            gradients[0].index_select(0, at_second),
            None,
        )


def merge(first: Tensor, at_first: Tensor, second: Tensor, at_second: Tensor) -> Tensor:
    """Put two sets of rows in one tensor, each row at its place, 0 .. m + n - 1."""
    return cast(Tensor, _Merge.apply(first, at_first, second, at_second))
