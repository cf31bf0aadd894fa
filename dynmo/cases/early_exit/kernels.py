"""What the tokens that remain compute: attention to all tokens, and streams put together.

Tokens are named by their index in the microbatch, [batch * sequence] in rows. A query attends to
the keys at its own position and before, in its own row. The order of all sums follows from the
indices alone, so a layer leaves the same bits on any rank.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor

from dynmo.extend import tiled

# Queries that are computed together. A tile also computes the pairs above its diagonal, in vain.
_TILE = 64


def plan_tiles(positions: Tensor, dtype: torch.dtype, tile: int = _TILE) -> list[tiled.Tile]:
    places = positions.tolist()
    tiles: list[tiled.Tile] = []
    for start in range(0, len(places), tile):
        stop = min(start + tile, len(places))
        end, seen_by_all = places[stop - 1] + 1, places[start] + 1
        keys = torch.arange(seen_by_all, end, device=positions.device)
        hidden = keys[None, :] > positions[start:stop, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        mask.masked_fill_(hidden, -torch.inf)
        tiles.append(tiled.Tile(start, stop, end, seen_by_all, mask))
    return tiles


class _KeptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Tensor:
        batch, sequence = k.shape[:2]
        ctx.save_for_backward(q, k, v, index)
        ctx.lengths = torch.bincount(index // sequence, minlength=batch).tolist()
        out = torch.empty_like(tiled.widened(q))
        for row, part in _rows(ctx.lengths):
            queries, keys, values = _heads_first(q[part], k[row], v[row])
            tiles = plan_tiles(index[part] - row * sequence, queries.dtype)
            tiled.attend(queries, keys, values, out[part].transpose(0, 1), tiles)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, index = ctx.saved_tensors
        # Rows without a query give their keys no gradient.
        gq, gk, gv = (torch.zeros_like(tiled.widened(x)) for x in (q, k, v))
        gout = tiled.widened(gradients[0])
        for row, part in _rows(ctx.lengths):
            queries, keys, values = _heads_first(q[part], k[row], v[row])
            tiles = plan_tiles(index[part] - row * k.shape[1], queries.dtype)
            # Sums over tiles are faster in one piece.
            to_k, to_v = (x.new_empty(x.shape) for x in (keys, values))
            g, to_q = (x[part].transpose(0, 1) for x in (gout, gq))
            tiled.attend_backward(queries, keys, values, g, to_q, to_k, to_v, tiles)
            gk[row], gv[row] = to_k.transpose(0, 1), to_v.transpose(0, 1)
        gq *= q.shape[-1] ** -0.5  # the gradient of the queries before they were scaled
        return gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype), None


def _rows(lengths: list[int]) -> list[tuple[int, slice]]:
    """List the rows that have queries, and the places of these."""
    ends = enumerate(pairwise(accumulate(lengths, initial=0)))
    return [(row, slice(start, stop)) for row, (start, stop) in ends if stop > start]


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn [tokens, heads, size] into [heads, tokens, size], and scale the queries."""
    q, k, v = (tiled.widened(x).transpose(0, 1) for x in (q, k, v))
    return q * q.shape[-1] ** -0.5, k, v


def attend_kept(q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Tensor:
    """Attend from the tokens `index` to all tokens.

    Args:
        q: Queries, [kept, heads, size].
        k: Keys, [batch, sequence, heads, size].
        v: Values, like the keys.
        index: int64 [kept], ascending.
    """
    return cast(Tensor, _KeptAttention.apply(q, k, v, index))


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
