"""What the selected tokens compute: taking them out of a stream, and attention among them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional


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
    """Return x, and its rows `index`, int64 without repetitions.

    Plain indexing would fill the gradient with zeros and add to it. This writes it once.
    """
    return cast("tuple[Tensor, Tensor]", _Select.apply(x, index))


def attend_packed(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Attend among the selected tokens of each row, which lie behind one another.

    q, k and v are [sum of lengths, heads, size].
    """
    if len(set(lengths)) == 1 and lengths[0]:
        return _attend(*(x.unflatten(0, (len(lengths), lengths[0])) for x in (q, k, v))).flatten(
            0, 1
        )
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    return torch.cat(
        [_attend(*(x[None] for x in part))[0] if len(part[0]) else part[0] for part in parts]
    )


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
