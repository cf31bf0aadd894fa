"""Sparse causal attention that computes only the pairs within one hash bucket.

The method is from Pagliardini et al. 2023. It is the attention of `shared_qk.py`, but position i
attends only to j < i of its own bucket. The bucket of x is argmax [xR, -xR], with R random unit
directions per head.

On CPU the positions of a bucket are gathered one behind the other (stable, so by position). Buckets
of like length are laid side by side and attended tile by tile:

    a bucket of 5, tiles of 2          keys  0 1 2 3
                           queries 1, 2      # #           # computed
                           queries 3, 4      # # # #
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dynmo.jit import jit
from dynmo.kernels.compiling import opaque
from dynmo.kernels.shared_qk import (
    FAST,
    SHORTEST,
    Tile,
    attend,
    attend_backward,
    scale_keys,
    take,
    widened,
)

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
        rows = rows if x.device.type == "cuda" else widened(rows)
        # In this order of factors: a product with few columns is slow.
        z = torch.bmm(directions.to(rows.dtype).mT, rows.permute(1, 2, 0))
        if z.device.type != "cpu":
            return torch.cat((z, -z), dim=1).argmax(1).t().reshape(batch, sequence, heads)
        out = torch.empty(batch, sequence, heads, dtype=torch.int64)
        _argmax(z.numpy(), out.numpy().reshape(-1, heads))
        return out


@jit(*FAST)
def _argmax(z: NDArray[Any], out: NDArray[np.int64]) -> None:
    """Find the argmax of [z, -z]. Rows are innermost, so many are compared at once."""
    heads, half, rows = z.shape
    high, low = np.empty(rows, z.dtype), np.empty(rows, z.dtype)
    highest, lowest = np.empty(rows, np.int32), np.empty(rows, np.int32)
    for h in range(heads):
        for row in range(rows):
            high[row] = low[row] = z[h, 0, row]
            highest[row] = lowest[row] = 0
        for j in range(1, half):
            for row in range(rows):
                here = z[h, j, row]
                above, below = here > high[row], here < low[row]
                high[row] = here if above else high[row]
                highest[row] = j if above else highest[row]
                low[row] = here if below else low[row]
                lowest[row] = j if below else lowest[row]
        for row in range(rows):
            out[row, h] = highest[row] if high[row] >= -low[row] else half + lowest[row]


# -- plan ------------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Buckets of like length side by side, from place `first` on."""

    first: int
    buckets: int
    length: int

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + self.buckets * self.length)

    def apart(self, x: Tensor) -> Tensor:
        return x.view(self.buckets, self.length, -1)

    def of(self, x: Tensor) -> Tensor:
        """Take the chunk's part of [places, size], as [buckets, length, size]."""
        return self.apart(x[self.places])


@dataclass(frozen=True)
class BucketPlan:
    """Places of the rows of x.

    Attributes:
        rows: The row in each place. -1 is padding.
        places: The place of each row.
        pairs: Number of (query, key) pairs that attend.
        computed: Number of pairs that the tiles compute, with masked and padded ones.
    """

    rows: Tensor
    places: Tensor
    chunks: tuple[Chunk, ...]
    pairs: int
    computed: int


def plan_buckets(buckets: Tensor, count: int, tile: int) -> BucketPlan:
    """Plan the places of all rows of buckets [batch, sequence, heads], 0..count-1."""
    numbers = buckets.contiguous().numpy()
    batch, _, heads = numbers.shape
    lengths, segments = _count(numbers, count)
    longest_first = np.argsort(-lengths, kind="stable")
    base = np.zeros(batch * heads * count, np.int64)
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
    rows, places = np.full(first, -1, np.int64), np.empty(numbers.size, np.int64)
    _place(segments, base, rows, places)
    computed = sum(
        c.buckets * sum((stop - start) * stop for start, stop in _steps(c.length - 1, tile))
        for c in chunks
    )
    pairs = int((lengths * (lengths - 1) // 2).sum())
    return BucketPlan(
        torch.from_numpy(rows), torch.from_numpy(places), tuple(chunks), pairs, computed
    )


@jit(*FAST)
def _count(buckets: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the length of each segment (batch, head, bucket), and each row's segment."""
    batch, sequence, heads = buckets.shape
    lengths = np.zeros(batch * heads * count, np.int64)
    segments = np.empty(batch * sequence * heads, np.int64)
    row = 0
    for b in range(batch):
        for t in range(sequence):
            for h in range(heads):
                segment = (b * heads + h) * count + buckets[b, t, h]
                segments[row] = segment
                lengths[segment] += 1
                row += 1
    return lengths, segments


@jit(*FAST)
def _place(
    segments: NDArray[np.int64],
    base: NDArray[np.int64],
    rows: NDArray[np.int64],
    places: NDArray[np.int64],
) -> None:
    """Sort stably by counting: each row takes the next place of its segment."""
    following = base.copy()
    for row in range(segments.shape[0]):
        place = following[segments[row]]
        following[segments[row]] = place + 1
        rows[place] = row
        places[row] = place


def _steps(queries: int, tile: int) -> Iterator[tuple[int, int]]:
    step = tile * max(1, -(-queries // (tile * _MOST_TILES)))
    return ((start, min(start + step, queries)) for start in range(0, queries, step))


def _staircase(queries: int, tile: int, like: Tensor) -> list[Tile]:
    """Query i sees keys 0..i."""
    steps = list(_steps(queries, tile))
    widest = max((stop - start for start, stop in steps), default=0)
    above = torch.full((widest, widest), float("-inf"), dtype=like.dtype).triu(1)
    return [
        Tile(start, stop, stop, start, above[: stop - start, : stop - start])
        for start, stop in steps
    ]


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
        q, k, values, out = (x.new_empty(plan.rows.shape[0], x.shape[-1]) for _ in range(4))
        factors = x.new_empty(plan.rows.shape[0])
        ctx.save_for_backward(q, k, factors, values)
        for chunk in plan.chunks:
            rows = plan.rows[chunk.places]
            take(x, rows, q[chunk.places])
            take(v, rows, values[chunk.places])
            scale_keys(q[chunk.places], ctx.scale, k[chunk.places], factors[chunk.places])
            tiles = _staircase(chunk.length - 1, tile, x)
            to = chunk.of(out)
            to[:, 0] = 0
            attend(chunk.of(q)[:, 1:], chunk.of(k), chunk.of(values), to[:, 1:], tiles)
        return out.index_select(0, plan.places).view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        plan: BucketPlan = ctx.plan
        q, k, factors, values = ctx.saved_tensors
        gq, gk, gv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
        for chunk in plan.chunks:
            gout = q.new_empty(chunk.buckets * chunk.length, q.shape[1])
            # 0 in the padding, so that it adds nothing.
            take(gradients[0], plan.rows[chunk.places], gout)
            queries, own_keys, vectors, to_k, to_v = (chunk.of(t) for t in (q, k, values, gk, gv))
            g, to_q = chunk.apart(gout)[:, 1:], chunk.of(gq)
            to_q[:, 0] = 0
            tiles = _staircase(chunk.length - 1, ctx.tile, q)
            attend_backward(queries[:, 1:], own_keys, vectors, g, to_q[:, 1:], to_k, to_v, tiles)
        gx = torch.empty(plan.places.shape[0], q.shape[1], dtype=q.dtype)
        keys, places = k.numpy(), plan.places.numpy()
        unscale = keys.dtype.type(ctx.scale**-2)
        _spread_x(gq.numpy(), gk.numpy(), keys, factors.numpy(), unscale, places, gx.numpy())
        return gx.view(ctx.shape), gv.index_select(0, plan.places).view(ctx.shape), None, None


def hash_attention(x: Tensor, v: Tensor, buckets: Tensor, count: int, tile: int = 32) -> Tensor:
    if x.device.type == "cuda":
        from dynmo.kernels import hash_attention_triton

        return hash_attention_triton.hash_attention(x, v, buckets, SHORTEST)
    return cast(
        Tensor,
        _HashAttention.apply(widened(x), widened(v), plan_buckets(buckets, count, tile), tile),
    ).to(x.dtype)


@opaque
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
