"""Causal attention of a part of the tokens: those that a model has not dropped.

    attend_kept    some queries, the keys and values of all tokens        early exit
    attend_packed  queries, keys and values of the same selected tokens   mixture of depths

Tokens are named by their index in the microbatch, [batch * sequence] in rows. A query attends to
the keys at its own position and before, in its own row. The order of all sums follows from the
indices alone, so a layer leaves the same bits on any rank.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dynmo.kernels.shared_qk import Tile, attend, attend_backward, widened
from dynmo.kernels.split import LOW

# Queries that are computed together. A tile also computes the pairs above its diagonal, in vain.
_TILE = 64


def row_lengths(index: Tensor, batch: int, sequence: int) -> list[int]:
    """Count the tokens of each row. `index` is int64 [tokens], ascending."""
    return torch.bincount(index // sequence, minlength=batch).tolist()


def plan_tiles(positions: Tensor, dtype: torch.dtype, tile: int = _TILE) -> list[Tile]:
    places = positions.tolist()
    tiles: list[Tile] = []
    for start in range(0, len(places), tile):
        stop = min(start + tile, len(places))
        end, seen_by_all = places[stop - 1] + 1, places[start] + 1
        keys = torch.arange(seen_by_all, end, device=positions.device)
        hidden = keys[None, :] > positions[start:stop, None]
        mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(
            hidden, -torch.inf
        )
        tiles.append(Tile(start, stop, end, seen_by_all, mask))
    return tiles


class _KeptAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, index: Tensor) -> Tensor:
        batch, sequence = k.shape[:2]
        ctx.save_for_backward(q, k, v, index)
        ctx.lengths = row_lengths(index, batch, sequence)
        out = torch.empty_like(q, dtype=_wide(q))
        for row, part in _rows(ctx.lengths):
            queries, keys, values = _heads_first(q[part], k[row], v[row])
            tiles = plan_tiles(index[part] - row * sequence, queries.dtype)
            attend(queries, keys, values, out[part].transpose(0, 1), tiles)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, index = ctx.saved_tensors
        gq, gk, gv = (torch.empty_like(x, dtype=_wide(x)) for x in (q, k, v))
        gout = widened(gradients[0])
        for row, part in _rows(ctx.lengths):
            queries, keys, values = _heads_first(q[part], k[row], v[row])
            tiles = plan_tiles(index[part] - row * k.shape[1], queries.dtype)
            # Sums over tiles are faster in one piece.
            to_k, to_v = (x.new_empty(x.shape) for x in (keys, values))
            g, to_q = (x[part].transpose(0, 1) for x in (gout, gq))
            attend_backward(queries, keys, values, g, to_q, to_k, to_v, tiles)
            gk[row], gv[row] = to_k.transpose(0, 1), to_v.transpose(0, 1)
        for row, length in enumerate(ctx.lengths):
            if not length:
                gk[row], gv[row] = 0, 0
        gq *= q.shape[-1] ** -0.5  # the gradient of the queries before they were scaled
        return gq.to(q.dtype), gk.to(k.dtype), gv.to(v.dtype), None


def _rows(lengths: list[int]) -> list[tuple[int, slice]]:
    ends = np.cumsum([0, *lengths]).tolist()
    return [
        (row, slice(start, stop))
        for row, (start, stop) in enumerate(pairwise(ends))
        if stop > start
    ]


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype that computes. On CPU low precisions are computed in float32."""
    return torch.float32 if x.dtype in LOW else x.dtype


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Turn [tokens, heads, size] into [heads, tokens, size], and scale the queries."""
    q, k, v = (widened(x).transpose(0, 1) for x in (q, k, v))
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


def attend_packed(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Attend among the selected tokens of each row, which lie behind one another.

    q, k and v are [sum of lengths, heads, size].
    """
    if len(set(lengths)) == 1 and lengths[0]:
        q, k, v = (x.unflatten(0, (len(lengths), lengths[0])).transpose(1, 2) for x in (q, k, v))
        return (
            functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(0, 1)
        )
    parts = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    out = [_row(*part) if part[0].shape[0] else part[0] for part in parts]
    return torch.cat(out)


def _row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    return (
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0).transpose(0, 1)
    )
