"""Strict causal attention with one vector x as query and key.

Each position and head has its own x. The key is x / |x|. A position never attends to itself,
because its own key would always win. A query with nothing before it gives 0.

This file has dense attention, and the parts of its sparse kinds on CPU. B computes the same tiles
again from the rows that F gathered. The order of all sums follows from the tiles alone, so a layer
leaves the same bits on any rank. x and v of bfloat16 or float16 are attended in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dynmo.jit import jit
from dynmo.kernels.split import LOW
from dynmo.kernels.torch_private import softmax_backward

SHORTEST = 1e-6  # a shorter x is divided by this instead of its length
# The sum over a head's numbers may be split over a vector's lanes. It is split alike on every rank,
# because all ranks run this code.
FAST = ("reassoc", "contract", "nsz")

Layout = tuple[
    int, int, int, int, int
]  # sequence, heads, and the strides of batch, position and head

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


# -- tiles -----------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Queries start..stop-1 against keys 0..end-1.

    Attributes:
        mask: Hides some of the keys masked_from..end-1.
        rows: 0 for a query without keys, else 1. None if every query has keys.
    """

    start: int
    stop: int
    end: int
    masked_from: int
    mask: Tensor
    rows: Tensor | None = None


def _weights(q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    scores = torch.bmm(q[:, tile.start : tile.stop], k[:, : tile.end].mT)
    if tile.masked_from < tile.end:
        scores[:, :, tile.masked_from :] += tile.mask
    weights = torch.softmax(scores, -1)
    return weights if tile.rows is None else weights.mul_(tile.rows)


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: Sequence[Tile]) -> None:
    """Compute out = softmax(q k^T) v, tile by tile."""
    for tile in tiles:
        out[:, tile.start : tile.stop] = torch.bmm(_weights(q, k, tile), v[:, : tile.end])


def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gout: Tensor,
    gq: Tensor,
    gk: Tensor,
    gv: Tensor,
    tiles: Sequence[Tile],
) -> None:
    """Write gq, gk and gv, of the shapes of q, k and v.

    The last tile sees all keys that any tile does. It writes gk and gv, and the others add to them.
    """
    for tile in reversed(tiles):
        weights, g = _weights(q, k, tile), gout[:, tile.start : tile.stop]
        gweights = torch.bmm(g, v[:, : tile.end].mT)
        gscores = softmax_backward(gweights, weights)
        gq[:, tile.start : tile.stop] = torch.bmm(gscores, k[:, : tile.end])
        to_k, to_v = torch.bmm(gscores.mT, q[:, tile.start : tile.stop]), torch.bmm(weights.mT, g)
        if tile is tiles[-1]:
            gk[:, : tile.end], gv[:, : tile.end] = to_k, to_v
            gk[:, tile.end :], gv[:, tile.end :] = 0, 0
        else:
            gk[:, : tile.end] += to_k
            gv[:, : tile.end] += to_v


# -- gathering -------------------------------------------------------------------------------------


def widened(x: Tensor) -> Tensor:
    """Convert x to a precision that the loops here know."""
    return x.float() if x.dtype in LOW else x


def _flat(x: Tensor) -> tuple[NDArray[Any], Layout]:
    """Return the memory behind x from its first number on, and its strides."""
    x = x.detach()
    if x.stride(-1) != 1:
        x = x.contiguous()
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((reach,), (1,)).numpy(), (
        x.shape[1],
        x.shape[2],
        x.stride(0),
        x.stride(1),
        x.stride(2),
    )


# The loops below first take each row as a view: they then become vector instructions.


@jit(*FAST)
def _gather(
    source: NDArray[Any], layout: Layout, rows: NDArray[np.int64], out: NDArray[Any]
) -> None:
    size = out.shape[1]
    sequence, heads, by_batch, by_position, by_head = layout
    for place in range(rows.shape[0]):
        row, to = rows[place], out[place]
        if row < 0:
            to[:] = 0
        else:
            position, head = row // heads, row % heads
            start = (
                position // sequence * by_batch + position % sequence * by_position + head * by_head
            )
            taken = source[start : start + size]
            for j in range(size):
                to[j] = taken[j]


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


def take(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Gather rows of x into `out`, [rows, size].

    Args:
        x: [batch, sequence, heads, size].
        rows: Rows of x as [batch * sequence * heads, size]. -1 gives zeros.
        out: Receives the rows.
    """
    _gather(*_flat(x), rows.numpy(), out.numpy())


def scale_keys(q: Tensor, scale: float, k: Tensor, factors: Tensor) -> None:
    """Write factors = scale / |q| and k = q * factors, for q [rows, size]."""
    array = q.numpy()
    # Numbers of the rows' own precision. Otherwise the loops would compute in double.
    _gather_keys(
        array, array.dtype.type(scale), array.dtype.type(SHORTEST), k.numpy(), factors.numpy()
    )
