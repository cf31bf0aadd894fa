"""Sparse causal attention with queries and keys dropped.

The method is from Pagliardini et al. 2023. It is the attention of `shared.py`, but a kept query
at i attends only to the kept keys at j < i. A dropped query gives 0. Tiles of queries meet the keys
up to the last that any of them sees, and a mask hides the rest:

    kept queries 1 4 6 7, kept keys 0 3 5, tiles of 2       keys 0 3 5
                                           queries 1, 4          # #           # computed
                                           queries 6, 7          # # #
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from dynmo.cases.sparse_attention.pairs import Scoring, drop_pairs
from dynmo.cases.sparse_attention.shared import scale_keys
from dynmo.extend import tiled


def draw_kept(heads: int, sequence: int, dropped: float, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the positions of the queries and of the keys that stay.

    Both are [heads, kept], ascending. The seed alone decides.
    """
    generator = torch.Generator().manual_seed(seed)
    kept = max(1, round((1 - dropped) * sequence))
    queries, keys = (
        torch.rand(heads, sequence, generator=generator).argsort(-1)[:, :kept].sort(-1).values
        for _ in range(2)
    )
    return queries, keys


@dataclass(frozen=True)
class KeptPlan:
    """Rows of x that are queries and keys, [batch * heads, kept] each, and the tiles."""

    queries: Tensor
    keys: Tensor
    tiles: tuple[tiled.Tile, ...]


def plan_kept(
    batch: int, sequence: int, queries: Tensor, keys: Tensor, tile: int, dtype: torch.dtype
) -> KeptPlan:
    """Find the rows of the kept positions, [heads, kept], and cut them into tiles."""
    heads = queries.shape[0]
    before = torch.searchsorted(keys, queries)  # the keys that each query sees: both ascend
    tiles = list[tiled.Tile]()
    for start in range(0, queries.shape[1], tile):
        seen = before[:, start : start + tile]
        end, masked_from = int(seen.max()), int(seen.min())
        hidden = torch.arange(masked_from, end) >= seen[..., None]
        # Finite: a row without any key has even weights, which `rows` sets to 0.
        mask = (
            torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -1e30).repeat(batch, 1, 1)
        )
        rows = None if masked_from else (seen > 0).to(dtype)[..., None].repeat(batch, 1, 1)
        tiles.append(tiled.Tile(start, start + seen.shape[1], end, masked_from, mask, rows))
    first = torch.arange(batch)[:, None, None] * sequence * heads + torch.arange(heads)[:, None]
    rows_q, rows_k = (
        (first + positions * heads).view(batch * heads, -1) for positions in (queries, keys)
    )
    return KeptPlan(rows_q, rows_k, tuple(tiles))


class _DropAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, plan: KeptPlan) -> Tensor:
        ctx.plan, ctx.shape, ctx.scale = plan, x.shape, x.shape[-1] ** -0.5
        rows_q, rows_k, rows_x = plan.queries.view(-1), plan.keys.view(-1), x.flatten(0, 2)
        q, sources = rows_x.index_select(0, rows_q), rows_x.index_select(0, rows_k)
        values = v.flatten(0, 2).index_select(0, rows_k)
        k, factors = scale_keys(sources, ctx.scale)
        ctx.save_for_backward(q, k, factors, values)
        kept = torch.empty_like(q)
        n = plan.queries.shape[0]
        queries, keys, vectors, to = (_apart(t, n) for t in (q, k, values, kept))
        tiled.attend(queries, keys, vectors, to, plan.tiles)
        out = x.new_zeros(ctx.shape)
        out.view(-1, q.shape[1]).index_copy_(0, rows_q, kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        plan: KeptPlan = ctx.plan
        q, k, factors, values = ctx.saved_tensors
        n, size = plan.queries.shape[0], q.shape[1]
        gq, gk, gv = (torch.empty_like(t) for t in (q, k, k))
        gout = gradients[0].flatten(0, 2).index_select(0, plan.queries.view(-1))
        queries, keys, vectors, g = (_apart(t, n) for t in (q, k, values, gout))
        to_q, to_k, to_v = (_apart(t, n) for t in (gq, gk, gv))
        tiled.attend_backward(queries, keys, vectors, g, to_q, to_k, to_v, plan.tiles)
        along = (k * gk).sum(-1, keepdim=True) / ctx.scale**2
        gx, gvalues = gq.new_zeros(ctx.shape), gq.new_zeros(ctx.shape)
        gx.view(-1, size).index_copy_(0, plan.queries.view(-1), gq)
        gx.view(-1, size).index_add_(0, plan.keys.view(-1), factors[:, None] * (gk - k * along))
        gvalues.view(-1, size).index_copy_(0, plan.keys.view(-1), gv)
        return gx, gvalues, None


def _apart(x: Tensor, n: int) -> Tensor:
    return x.view(n, -1, x.shape[1])


def drop_attention(x: Tensor, v: Tensor, queries: Tensor, keys: Tensor, tile: int = 64) -> Tensor:
    assert x.device.type == "cpu", "the case says so"
    wide = tiled.widened(x)
    plan = plan_kept(x.shape[0], x.shape[1], queries, keys, tile, wide.dtype)
    return cast(Tensor, _DropAttention.apply(wide, tiled.widened(v), plan)).to(x.dtype)


@dataclass(frozen=True)
class Dropped:
    """Attention that drops this share of the queries and keys, others in each head."""

    share: float
    tile: int
    seed: int

    def __call__(self, x: Tensor, v: Tensor) -> Tensor:
        return drop_attention(
            x, v, *draw_kept(x.shape[2], x.shape[1], self.share, self.seed), self.tile
        )

    def of_pairs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **scoring: Any
    ) -> Tensor:
        """Attends with a query and a key of each position (`pairs.drop_pairs`)."""
        kept = draw_kept(k.shape[1], k.shape[2], self.share, self.seed)
        return drop_pairs(q, k, v, mask, kept, self.tile, Scoring(**scoring))
