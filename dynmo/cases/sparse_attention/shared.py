"""Strict causal attention with one vector x as query and key.

Each position and head has its own x. The key is x / |x|. A position never attends to itself,
because its own key would always win. A query with nothing before it gives 0.

This file has dense attention, and the parts of its sparse kinds on CPU. B computes the same tiles
again from the rows that F gathered. x and v of bfloat16 or float16 are attended in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dynmo.extend import jit

SHORTEST = 1e-6  # a shorter x is divided by this instead of its length
# The sum over a head's numbers may be split over a vector's lanes. It is split alike on every rank,
# because all ranks run this code.
FAST = ("reassoc", "contract", "nsz")

SparseAttention = Callable[[Tensor, Tensor], Tensor]
"""Takes x and v, [batch, sequence, heads, size] each, and returns a tensor like them."""


def dense_attention(x: Tensor, v: Tensor) -> Tensor:
    """Compute the attention without omissions. All are [batch, sequence, heads, size].

    Query i + 1 sees keys 0..i, so shifted by one place it is plain causal attention.
    """
    q = x[:, 1:]
    k = x[:, :-1] / x[:, :-1].norm(dim=-1, keepdim=True).clamp_min(SHORTEST)
    values = v[:, :-1]
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), values.transpose(1, 2), is_causal=True
    )
    return functional.pad(out.transpose(1, 2), (0, 0, 0, 0, 1, 0))


def rows_of(x: Tensor) -> Tensor:
    """Copy x, [batch, sequence, heads, size], into [rows + 1, size]. The last row has zeros."""
    out = x.new_empty(x.shape[:3].numel() + 1, x.shape[3])
    out[:-1].view(x.shape).copy_(x)
    out[-1] = 0
    return out


# A loop first takes each row as a view: it then becomes vector instructions.
@jit(*FAST)
def _gather_keys(
    q: NDArray[Any], scale: float, shortest: float, k: NDArray[Any], factors: NDArray[Any]
) -> None:
    for place in range(q.shape[0]):
        taken, to = q[place], k[place]
        total = taken[0] * taken[0]
        for j in range(1, taken.shape[0]):
            total += taken[j] * taken[j]
        factor = scale / max(np.sqrt(total), shortest)
        factors[place] = factor
        for j in range(taken.shape[0]):
            to[j] = taken[j] * factor


def scale_keys(q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute the keys q * factors and the factors scale / |q|, for q [rows, size]."""
    k, factors, array = torch.empty_like(q), q.new_empty(len(q)), q.numpy()
    # Numbers of the rows' own precision. Otherwise the loops would compute in double.
    number = array.dtype.type
    _gather_keys(array, number(scale), number(SHORTEST), k.numpy(), factors.numpy())
    return k, factors
