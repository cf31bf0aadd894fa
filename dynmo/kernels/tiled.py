"""Attention of which only a part is computed, in tiles: some queries against some keys.

The backward computes the same tiles again. The order of all sums follows from the tiles alone, so a
layer leaves the same bits on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynmo.kernels.split import LOW
from dynmo.kernels.torch_private import softmax_backward


def widened(x: Tensor) -> Tensor:
    """Convert x to a precision that is attended on the CPU."""
    return x.float() if x.dtype in LOW else x


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
