"""Sparse causal attention that computes only the pairs within one hash bucket.

The method is from Pagliardini et al. 2023. It is the attention of `shared.py`, but position i
attends only to j < i of its own bucket. The bucket of x is argmax [xR, -xR], with R random unit
directions per head.

On CPU the positions of a bucket are gathered one behind the other (stable, so by position). Buckets
of like length are laid side by side and attended tile by tile:

    a bucket of 5, tiles of 2          keys  0 1 2 3
                           queries 1, 2      # #           # computed
                           queries 3, 4      # # # #
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dynmo.cases.sparse_attention import hashed_triton
from dynmo.cases.sparse_attention.pairs import Scoring, hash_pairs
from dynmo.cases.sparse_attention.shared import FAST, SHORTEST, rows_of, scale_keys
from dynmo.extend import jit, tiled

# Rows of one batch of buckets: the data that a bmm reads and writes then stays in a core's cache.
_CHUNK_ROWS = 2048
# Most tiles along one bucket: long buckets have larger tiles.
_MOST_TILES = 8


# -- buckets ---------------------------------------------------------------------------------------


def draw_directions(
    heads: int, size: int, buckets: int, seed: int, device: torch.device | None = None
) -> Tensor:
    """Draw R, [heads, size, buckets / 2] of unit columns. The seed alone decides."""
    generator = torch.Generator().manual_seed(seed)
    return functional.normalize(
        torch.randn(heads, size, buckets // 2, generator=generator), dim=1
    ).to(device)


# On CUDA a copy from host memory makes the host wait for the device. The cache holds as many
# entries as one rank may have layers.
_directions_on_device = lru_cache(maxsize=128)(draw_directions)


def hash_buckets(x: Tensor, directions: Tensor) -> Tensor:
    """Find the bucket of each vector, int64 [batch, sequence, heads].

    Args:
        x: [batch, sequence, heads, size].
        directions: R, [heads, size, buckets / 2].
    """
    batch, sequence, heads, size = x.shape
    with torch.no_grad():
        rows = x.reshape(batch * sequence, heads, size)
        rows = rows if x.device.type == "cuda" else tiled.widened(rows)
        # In this order of factors: a product with few columns is slow.
        z = torch.bmm(directions.to(rows.dtype).mT, rows.permute(1, 2, 0))
        # On CPU `max` is faster than `argmax`. Both take the first of equal ones.
        return torch.cat((z, -z), dim=1).max(1).indices.t().reshape(batch, sequence, heads)


# -- plan ------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Buckets of like length side by side, from place `first` on."""

    first: int
    buckets: int
    length: int

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + self.buckets * self.length)

    def of(self, x: Tensor) -> Tensor:
        """Take the chunk's part of [places, size], as [buckets, length, size]."""
        return x[self.places].view(self.buckets, self.length, -1)


class BucketPlan(NamedTuple):
    """Places of the rows of x.

    Attributes:
        rows: The row in each place. Padding has the row behind the last.
        places: The place of each row.
    """

    rows: Tensor
    places: Tensor
    chunks: tuple[Chunk, ...]


def plan_buckets(buckets: Tensor, count: int) -> BucketPlan:
    """Plan the places of all rows of buckets [batch, sequence, heads], 0..count-1."""
    batch, _, heads = buckets.shape
    # Each bucket of each row and head. Numbers of 16 bits are sorted faster.
    groups = np.arange(batch * heads).reshape(batch, 1, heads) * count + buckets.numpy()
    groups = groups.ravel().astype(np.min_scalar_type(batch * heads * count))
    lengths = np.bincount(groups, minlength=batch * heads * count)
    longest_first = np.argsort(-lengths, kind="stable")
    base = np.zeros(len(lengths), np.int64)
    chunks, first, at = list[Chunk](), 0, 0
    used = int(np.count_nonzero(lengths))
    ordered = lengths[longest_first].tolist()
    while at < used:
        length = max(2, ordered[at])
        stop = at + 1
        # Like lengths only, because padding is computed too.
        while (
            stop < used and (stop - at) * length < _CHUNK_ROWS and 4 * ordered[stop] >= 3 * length
        ):
            stop += 1
        base[longest_first[at:stop]] = first + length * np.arange(stop - at)
        chunks.append(Chunk(first, stop - at, length))
        first += (stop - at) * length
        at = stop
    order = np.argsort(groups, kind="stable")
    base -= np.cumsum(lengths) - lengths
    sorted_places = base[groups[order]] + np.arange(len(order))
    rows, places = np.full(first, len(order)), np.empty(len(order), np.int64)
    rows[sorted_places], places[order] = order, sorted_places
    return BucketPlan(torch.from_numpy(rows), torch.from_numpy(places), tuple(chunks))


def staircase(queries: int, tile: int, dtype: torch.dtype) -> list[tiled.Tile]:
    """Cut queries into tiles. Query i sees keys 0..i."""
    step = tile * max(1, -(-queries // (tile * _MOST_TILES)))
    above = torch.full((min(step, queries),) * 2, -torch.inf, dtype=dtype).triu(1)
    ends = [(start, min(start + step, queries)) for start in range(0, queries, step)]
    return [tiled.Tile(a, b, b, a, above[: b - a, : b - a]) for a, b in ends]


# -- hashed ----------------------------------------------------------------------------------------


@jit(*FAST)
def _spread_x(
    gq: NDArray[Any],
    gk: NDArray[Any],
    k: NDArray[Any],
    factors: NDArray[Any],
    unscale: float,
    places: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """Compute the gradient of x: as a query, and as a key through k = scale x / |x|.

    `unscale` is 1 / scale^2.
    """
    for row in range(places.shape[0]):
        place = places[row]
        as_query, as_key, key, to = gq[place], gk[place], k[place], out[row]
        along = key[0] * as_key[0]
        for j in range(1, key.shape[0]):
            along += key[j] * as_key[j]
        factor = factors[place]
        back = factor * along * unscale
        for j in range(key.shape[0]):
            to[j] = as_query[j] + factor * as_key[j] - back * key[j]


class _HashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, plan: BucketPlan, tile: int) -> Tensor:
        ctx.plan, ctx.tile, ctx.shape = plan, tile, x.shape
        ctx.scale = x.shape[-1] ** -0.5
        q, values = (rows_of(t).index_select(0, plan.rows) for t in (x, v))
        k, factors = scale_keys(q, ctx.scale)
        ctx.save_for_backward(q, k, factors, values)
        out = torch.empty_like(q)
        for chunk in plan.chunks:
            tiles = staircase(chunk.length - 1, tile, x.dtype)
            to = chunk.of(out)
            to[:, 0] = 0
            tiled.attend(chunk.of(q)[:, 1:], chunk.of(k), chunk.of(values), to[:, 1:], tiles)
        return out.index_select(0, plan.places).view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        plan: BucketPlan = ctx.plan
        q, k, factors, values = ctx.saved_tensors
        gq, gk, gv = (torch.empty_like(q) for _ in range(3))
        # 0 in the padding, so that it adds nothing.
        gout = rows_of(gradients[0])
        for chunk in plan.chunks:
            g = gout.index_select(0, plan.rows[chunk.places]).view(chunk.buckets, chunk.length, -1)
            queries, own_keys, vectors, to_k, to_v = map(chunk.of, (q, k, values, gk, gv))
            to_q = chunk.of(gq)
            to_q[:, 0] = 0
            tiles, g, to_q = staircase(chunk.length - 1, ctx.tile, q.dtype), g[:, 1:], to_q[:, 1:]
            tiled.attend_backward(queries[:, 1:], own_keys, vectors, g, to_q, to_k, to_v, tiles)
        gx = torch.empty(plan.places.shape[0], q.shape[1], dtype=q.dtype)
        keys, places = k.numpy(), plan.places.numpy()
        unscale = keys.dtype.type(ctx.scale**-2)
        _spread_x(gq.numpy(), gk.numpy(), keys, factors.numpy(), unscale, places, gx.numpy())
        return gx.view(ctx.shape), gv.index_select(0, plan.places).view(ctx.shape), None, None


def hash_attention(x: Tensor, v: Tensor, buckets: Tensor, count: int, tile: int = 32) -> Tensor:
    if x.device.type == "cuda":
        return hashed_triton.hash_attention(x, v, buckets, SHORTEST)
    plan = plan_buckets(buckets, count)
    return cast(
        Tensor,
        _HashAttention.apply(tiled.widened(x), tiled.widened(v), plan, tile),
    ).to(x.dtype)


@dataclass(frozen=True)
class Hashed:
    """Attention within hash buckets. Its directions follow from the seed."""

    buckets: int
    tile: int
    seed: int

    def __call__(self, x: Tensor, v: Tensor) -> Tensor:
        draw = _directions_on_device if x.device.type == "cuda" else draw_directions
        directions = draw(x.shape[2], x.shape[3], self.buckets, self.seed, x.device)
        return hash_attention(x, v, hash_buckets(x, directions), self.buckets, self.tile)

    def of_pairs(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **scoring: Any
    ) -> Tensor:
        """Attends with a query and a key of each position (`pairs.hash_pairs`)."""
        draw = _directions_on_device if q.device.type == "cuda" else draw_directions
        directions = draw(k.shape[1], k.shape[3], self.buckets, self.seed, k.device)
        return hash_pairs(q, k, v, mask, directions, self.tile, Scoring(**scoring))
