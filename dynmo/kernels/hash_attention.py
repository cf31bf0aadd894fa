"""Sparse causal attention that computes only what is left: by hashed buckets, or with queries and keys dropped (Pagliardini et al. 2023).

Queries and keys are one vector x per position and head; the key is x / |x|. A position never attends to itself (its own key would always
win), so every kind here is strict, and a query with nothing before it gives 0.

    hash   position i attends to j < i of its own bucket; bucket = argmax [xR, -xR] with R random unit directions per head
    drop   a kept query at i attends to the kept keys at j < i; a dropped query gives 0

On CPU the positions of a bucket are gathered one behind the other (stable, so by position), buckets of like length are laid side by side
and attended tile by tile. Only the staircase below the diagonal is computed, and B computes the same tiles again from what F gathered:

    a bucket of 5, tiles of 2          keys  0 1 2 3
                           queries 1, 2      # #           # computed
                           queries 3, 4      # # # #

The order of all sums follows from the buckets' lengths alone, so a layer leaves the same bits on any rank. On CPU x and v of bfloat16 or
float16 are attended in float32, and the result is rounded.
"""

# numba has no types: its functions are given theirs by `_jit`.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from dynmo.errors import RunError
from dynmo.kernels.split import LOW

# Rows of one batch of buckets: what a bmm reads and writes then stays in a core's cache.
_CHUNK_ROWS = 2048
# At most so many tiles along one bucket: long buckets have larger tiles.
_MOST_TILES = 8
_SHORTEST = 1e-6  # a shorter x is divided by this, not by its length

_F = TypeVar("_F", bound=Callable[..., Any])
# The sum over a head's numbers may be split over a vector's lanes: the same way on every rank, for all run this code.
Layout = tuple[int, int, int, int, int]  # sequence, heads, and the strides of batch, position and head
_FAST = {"reassoc", "contract", "nsz"}


def _jit(function: _F) -> _F:
    try:
        return cast(_F, numba.njit(nogil=True, fastmath=_FAST, cache=True)(function))
    except RuntimeError:  # nowhere to keep the compiled code: it is made anew in each process
        return cast(_F, numba.njit(nogil=True, fastmath=_FAST)(function))


# -- buckets ------------------------------------------------------------------------------------------------------------------


def draw_directions(heads: int, size: int, buckets: int, seed: int, device: torch.device | None = None) -> Tensor:
    """R: [heads, size, buckets / 2] of unit columns, a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return functional.normalize(torch.randn(heads, size, buckets // 2, generator=generator), dim=1).to(device)


def hash_buckets(x: Tensor, directions: Tensor) -> Tensor:
    """x: [batch, sequence, heads, size] -> bucket of each, [batch, sequence, heads] of int64: argmax [xR, -xR], the first of equals."""
    batch, sequence, heads, size = x.shape
    with torch.no_grad():
        rows = x.reshape(batch * sequence, heads, size)
        rows = rows if x.device.type == "cuda" else _computed(rows)
        # This way round: a product with few columns is slow.
        z = torch.bmm(directions.to(rows.dtype).mT, rows.permute(1, 2, 0))
        if z.device.type != "cpu":
            return torch.cat((z, -z), dim=1).argmax(1).t().reshape(batch, sequence, heads)
        out = torch.empty(batch, sequence, heads, dtype=torch.int64)
        _argmax(z.numpy(), out.numpy().reshape(-1, heads))
        return out


@_jit
def _argmax(z: NDArray[Any], out: NDArray[np.int64]) -> None:
    """Rows innermost and without branches, so that many are compared at once."""
    heads, half, rows = z.shape
    high, low = np.empty(rows, z.dtype), np.empty(rows, z.dtype)
    highest, lowest = np.empty(rows, np.int32), np.empty(rows, np.int32)
    for h in range(heads):
        high[:], low[:] = z[h, 0], z[h, 0]
        highest[:], lowest[:] = 0, 0
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


# -- what is computed -----------------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """Queries start..stop-1 against keys 0..end-1; `mask` hides some of the keys masked_from..end-1. rows: 0 for a query without keys."""

    start: int
    stop: int
    end: int
    masked_from: int
    mask: Tensor
    rows: Tensor | None = None


class Chunk(NamedTuple):
    """Buckets of like length side by side: `buckets` x `length` places from place `first` on."""

    first: int
    buckets: int
    length: int

    @property
    def places(self) -> slice:
        return slice(self.first, self.first + self.buckets * self.length)

    def apart(self, x: Tensor) -> Tensor:
        """[buckets * length, size] -> [buckets, length, size]."""
        return x.view(self.buckets, self.length, -1)

    def of(self, x: Tensor) -> Tensor:
        """The chunk's part of [places, size], as [buckets, length, size]."""
        return self.apart(x[self.places])


@dataclass(frozen=True)
class Plan:
    """Where each row of x goes. rows: the row in each place (-1: padding); places: the place of each row; pairs: (query, key) pairs
    that attend; computed: those the tiles compute, masked and padded ones among them."""

    rows: Tensor
    places: Tensor
    chunks: tuple[Chunk, ...]
    pairs: int
    computed: int


def plan_buckets(buckets: Tensor, count: int, tile: int) -> Plan:
    """buckets: [batch, sequence, heads], each of 0..count-1."""
    found = buckets.contiguous().numpy()
    batch, _, heads = found.shape
    lengths, segments = _count(found, count)
    longest_first = np.argsort(-lengths, kind="stable")
    base = np.zeros(batch * heads * count, np.int64)
    chunks, first, at = list[Chunk](), 0, 0
    used = int(np.count_nonzero(lengths))
    ordered = lengths[longest_first].tolist()
    while at < used:
        length = max(2, ordered[at])
        stop = at + 1
        # Like lengths only: padding is computed too.
        while stop < used and (stop - at) * length < _CHUNK_ROWS and 4 * ordered[stop] >= 3 * length:
            stop += 1
        base[longest_first[at:stop]] = first + length * np.arange(stop - at)
        chunks.append(Chunk(first, stop - at, length))
        first += (stop - at) * length
        at = stop
    rows, places = np.full(first, -1, np.int64), np.empty(found.size, np.int64)
    _place(segments, base, rows, places)
    computed = sum(c.buckets * sum((stop - start) * stop for start, stop in _steps(c.length - 1, tile)) for c in chunks)
    pairs = int((lengths * (lengths - 1) // 2).sum())
    return Plan(torch.from_numpy(rows), torch.from_numpy(places), tuple(chunks), pairs, computed)


@_jit
def _count(buckets: NDArray[np.int64], count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The length of each segment (batch, head, bucket), and the segment of each row of x."""
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


@_jit
def _place(segments: NDArray[np.int64], base: NDArray[np.int64], rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
    """A stable sort by counting: rows come in the order of their positions, and take the next place of their segment."""
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
    return [Tile(start, stop, stop, start, above[: stop - start, : stop - start]) for start, stop in steps]


# -- tiles ------------------------------------------------------------------------------------------------------------------------


def _weights(q: Tensor, k: Tensor, tile: Tile) -> Tensor:
    scores = torch.bmm(q[:, tile.start : tile.stop], k[:, : tile.end].mT)
    if tile.masked_from < tile.end:
        scores[:, :, tile.masked_from :] += tile.mask
    weights = torch.softmax(scores, -1)
    return weights if tile.rows is None else weights.mul_(tile.rows)


def _attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: Sequence[Tile]) -> None:
    """q: [n, queries, size]; k, v: [n, keys, size]; k is scaled."""
    for tile in tiles:
        out[:, tile.start : tile.stop] = torch.bmm(_weights(q, k, tile), v[:, : tile.end])


def _attend_backward(q: Tensor, k: Tensor, v: Tensor, gout: Tensor, gq: Tensor, gk: Tensor, gv: Tensor, tiles: Sequence[Tile]) -> None:
    """The last tile sees all keys that any does, so it writes gk and gv and the others add to it."""
    for tile in reversed(tiles):
        weights, g = _weights(q, k, tile), gout[:, tile.start : tile.stop]
        gweights = torch.bmm(g, v[:, : tile.end].mT)
        gscores = torch._softmax_backward_data(gweights, weights, -1, weights.dtype)
        gq[:, tile.start : tile.stop] = torch.bmm(gscores, k[:, : tile.end])
        to_k, to_v = torch.bmm(gscores.mT, q[:, tile.start : tile.stop]), torch.bmm(weights.mT, g)
        if tile is tiles[-1]:
            gk[:, : tile.end], gv[:, : tile.end] = to_k, to_v
            gk[:, tile.end :], gv[:, tile.end :] = 0, 0
        else:
            gk[:, : tile.end] += to_k
            gv[:, : tile.end] += to_v


# -- gathering --------------------------------------------------------------------------------------------------------------------


def _flat(x: Tensor) -> tuple[NDArray[Any], Layout]:
    """The memory behind x [batch, sequence, heads, size] from its first number on, and its strides; copies only where the last is not 1."""
    x = x.detach()
    if x.stride(-1) != 1:
        x = x.contiguous()
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.as_strided((reach,), (1,)).numpy(), (x.shape[1], x.shape[2], x.stride(0), x.stride(1), x.stride(2))


# In the loops below each row is first taken as a view: so they become vector instructions.


@_jit
def _gather(source: NDArray[Any], layout: Layout, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    size = out.shape[1]
    sequence, heads, by_batch, by_position, by_head = layout
    for place in range(rows.shape[0]):
        row, to = rows[place], out[place]
        if row < 0:
            to[:] = 0
        else:
            position, head = row // heads, row % heads
            start = position // sequence * by_batch + position % sequence * by_position + head * by_head
            taken = source[start : start + size]
            for j in range(size):
                to[j] = taken[j]


@_jit
def _gather_keys(q: NDArray[Any], scale: float, shortest: float, k: NDArray[Any], factors: NDArray[Any]) -> None:
    """k = q * factor, with factor = scale / |q|."""
    for place in range(q.shape[0]):
        taken, to = q[place], k[place]
        total = taken[0] * taken[0]
        for j in range(1, taken.shape[0]):
            total += taken[j] * taken[j]
        factor = scale / max(np.sqrt(total), shortest)
        factors[place] = factor
        for j in range(taken.shape[0]):
            to[j] = taken[j] * factor


@_jit
def _spread_x(
    gq: NDArray[Any],
    gk: NDArray[Any],
    k: NDArray[Any],
    factors: NDArray[Any],
    unscale: float,
    places: NDArray[np.int64],
    out: NDArray[Any],
) -> None:
    """The gradient of x: as a query, and as a key through k = scale x / |x|. unscale: 1 / scale^2."""
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


def _take(x: Tensor, rows: Tensor, out: Tensor) -> None:
    _gather(*_flat(x), rows.numpy(), out.numpy())


def _scale(q: Tensor, scale: float, k: Tensor, factors: Tensor) -> None:
    array = q.numpy()
    # Numbers of the rows' own precision: else the loops would compute in double.
    _gather_keys(array, array.dtype.type(scale), array.dtype.type(_SHORTEST), k.numpy(), factors.numpy())


# -- hashed -----------------------------------------------------------------------------------------------------------------------


class _HashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, plan: Plan, tile: int) -> Tensor:
        ctx.plan, ctx.tile, ctx.shape = plan, tile, x.shape
        ctx.scale = x.shape[-1] ** -0.5
        q, k, values, out = (x.new_empty(plan.rows.shape[0], x.shape[-1]) for _ in range(4))
        factors = x.new_empty(plan.rows.shape[0])
        ctx.save_for_backward(q, k, factors, values)
        for chunk in plan.chunks:
            rows = plan.rows[chunk.places]
            _take(x, rows, q[chunk.places])
            _take(v, rows, values[chunk.places])
            _scale(q[chunk.places], ctx.scale, k[chunk.places], factors[chunk.places])
            each = [chunk.of(t) for t in (q, k, values, out)]
            each[3][:, 0] = 0
            _attend(each[0][:, 1:], each[1], each[2], each[3][:, 1:], _staircase(chunk.length - 1, tile, x))
        return out.index_select(0, plan.places).view(ctx.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        plan: Plan = ctx.plan
        q, k, factors, values = ctx.saved_tensors
        gq, gk, gv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)
        for chunk in plan.chunks:
            gout = q.new_empty(chunk.buckets * chunk.length, q.shape[1])
            _take(gradients[0], plan.rows[chunk.places], gout)  # 0 in the padding, so that nothing comes from there
            each = [*(chunk.of(t) for t in (q, k, values)), chunk.apart(gout), *(chunk.of(t) for t in (gq, gk, gv))]
            each[4][:, 0] = 0
            shifted = (each[0][:, 1:], each[1], each[2], each[3][:, 1:], each[4][:, 1:], each[5], each[6])
            _attend_backward(*shifted, _staircase(chunk.length - 1, ctx.tile, q))
        gx = torch.empty(plan.places.shape[0], q.shape[1], dtype=q.dtype)
        keys = k.numpy()
        _spread_x(gq.numpy(), gk.numpy(), keys, factors.numpy(), keys.dtype.type(ctx.scale**-2), plan.places.numpy(), gx.numpy())
        return gx.view(ctx.shape), gv.index_select(0, plan.places).view(ctx.shape), None, None


def _computed(x: Tensor) -> Tensor:
    """In a precision that the loops here know."""
    return x.float() if x.dtype in LOW else x


def hash_attention(x: Tensor, v: Tensor, buckets: Tensor, count: int, tile: int = 32) -> Tensor:
    """Attention within buckets. x, v: [batch, sequence, heads, size]; buckets: [batch, sequence, heads] of 0..count-1; like x.

    tile: queries that are computed together (a long bucket takes a multiple of it).
    """
    if x.device.type == "cuda":
        from dynmo.kernels import hash_attention_triton

        return hash_attention_triton.hash_attention(x, v, buckets, _SHORTEST)
    return cast(Tensor, _HashAttention.apply(_computed(x), _computed(v), plan_buckets(buckets, count, tile), tile)).to(x.dtype)


# -- dropped ----------------------------------------------------------------------------------------------------------------------


def draw_kept(heads: int, sequence: int, dropped: float, seed: int) -> tuple[Tensor, Tensor]:
    """Positions of the queries and of the keys that stay, ascending, per head: [heads, kept] each, a function of the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    kept = max(1, round((1 - dropped) * sequence))
    queries, keys = (torch.rand(heads, sequence, generator=generator).argsort(-1)[:, :kept].sort(-1).values for _ in range(2))
    return queries, keys


@dataclass(frozen=True)
class KeptPlan:
    """The rows of x that are queries and keys, [batch * heads, kept] each, and the tiles. pairs, computed: as of `Plan`."""

    queries: Tensor
    keys: Tensor
    tiles: tuple[Tile, ...]
    pairs: int
    computed: int


def plan_kept(batch: int, sequence: int, queries: Tensor, keys: Tensor, tile: int, dtype: torch.dtype) -> KeptPlan:
    """queries, keys: positions, [heads, kept], ascending."""
    heads = queries.shape[0]
    before = torch.searchsorted(keys, queries)  # the keys that each query sees, for both ascend
    tiles = list[Tile]()
    for start in range(0, queries.shape[1], tile):
        seen = before[:, start : start + tile]
        end, masked_from = int(seen.max()), int(seen.min())
        hidden = torch.arange(masked_from, end) >= seen[..., None]
        # Finite: a row without any key has even weights, which `rows` takes away.
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -1e30).repeat(batch, 1, 1)
        rows = None if masked_from else (seen > 0).to(dtype)[..., None].repeat(batch, 1, 1)
        tiles.append(Tile(start, start + seen.shape[1], end, masked_from, mask, rows))
    first = torch.arange(batch)[:, None, None] * sequence * heads + torch.arange(heads)[:, None]
    rows_q, rows_k = ((first + positions * heads).view(batch * heads, -1) for positions in (queries, keys))
    computed = batch * heads * sum((t.stop - t.start) * t.end for t in tiles)
    return KeptPlan(rows_q, rows_k, tuple(tiles), batch * int(before.sum()), computed)


class _DropAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor, plan: KeptPlan) -> Tensor:
        ctx.plan, ctx.shape, ctx.scale = plan, x.shape, x.shape[-1] ** -0.5
        rows_q, rows_k = plan.queries.view(-1), plan.keys.view(-1)
        q, k, values, sources = (x.new_empty(len(rows), x.shape[-1]) for rows in (rows_q, rows_k, rows_k, rows_k))
        factors = x.new_empty(len(rows_k))
        for taken, rows, out in ((x, rows_q, q), (v, rows_k, values), (x, rows_k, sources)):
            _take(taken, rows, out)
        _scale(sources, ctx.scale, k, factors)
        ctx.save_for_backward(q, k, factors, values)
        kept = torch.empty_like(q)
        n = plan.queries.shape[0]
        _attend(q.view(n, -1, q.shape[1]), _apart(k, n), _apart(values, n), _apart(kept, n), plan.tiles)
        out = x.new_zeros(ctx.shape)
        out.view(-1, q.shape[1]).index_copy_(0, rows_q, kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        plan: KeptPlan = ctx.plan
        q, k, factors, values = ctx.saved_tensors
        n, size = plan.queries.shape[0], q.shape[1]
        gout, gq, gk, gv = torch.empty_like(q), torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
        _take(gradients[0], plan.queries.view(-1), gout)
        products = (_apart(gq, n), _apart(gk, n), _apart(gv, n))
        _attend_backward(q.view(n, -1, size), _apart(k, n), _apart(values, n), _apart(gout, n), *products, plan.tiles)
        along = (k * gk).sum(-1, keepdim=True) / ctx.scale**2
        gx, gvalues = gq.new_zeros(ctx.shape), gq.new_zeros(ctx.shape)
        gx.view(-1, size).index_copy_(0, plan.queries.view(-1), gq)
        gx.view(-1, size).index_add_(0, plan.keys.view(-1), factors[:, None] * (gk - k * along))
        gvalues.view(-1, size).index_copy_(0, plan.keys.view(-1), gv)
        return gx, gvalues, None


def _apart(x: Tensor, n: int) -> Tensor:
    return x.view(n, -1, x.shape[1])


def drop_attention(x: Tensor, v: Tensor, queries: Tensor, keys: Tensor, tile: int = 64) -> Tensor:
    """Attention of the queries and keys that are kept, [heads, kept] positions, ascending. x, v: [batch, sequence, heads, size]; like x."""
    if x.device.type != "cpu":
        raise RunError('dynamism.sparse_attention.kind = "drop" has no CUDA kernel; use "hash", or train on the CPU')
    wide = _computed(x)
    plan = plan_kept(x.shape[0], x.shape[1], queries, keys, tile, wide.dtype)
    return cast(Tensor, _DropAttention.apply(wide, _computed(v), plan)).to(x.dtype)


# -- as a model's layer has it ----------------------------------------------------------------------------------------------------

SparseAttention = Callable[[Tensor, Tensor], Tensor]
"""Takes x and v, [batch, sequence, heads, size] each, and gives the like."""


@dataclass(frozen=True)
class Hashed:
    """The directions are drawn anew from the seed at each call, so nothing has to be kept or moved."""

    buckets: int
    tile: int
    seed: int

    def __call__(self, x: Tensor, v: Tensor) -> Tensor:
        directions = draw_directions(x.shape[2], x.shape[3], self.buckets, self.seed, x.device)
        return hash_attention(x, v, hash_buckets(x, directions), self.buckets, self.tile)


@dataclass(frozen=True)
class Dropped:
    """Drops this share of the queries and of the keys, others in each head."""

    share: float
    tile: int
    seed: int

    def __call__(self, x: Tensor, v: Tensor) -> Tensor:
        return drop_attention(x, v, *draw_kept(x.shape[2], x.shape[1], self.share, self.seed), self.tile)


# -- dense ------------------------------------------------------------------------------------------------------------------------


def dense_attention(x: Tensor, v: Tensor) -> Tensor:
    """The same attention with nothing left out: position i attends to all j < i. x, v: [batch, sequence, heads, size]; like x.

    Query i + 1 sees keys 0..i, so one place aside it is plain causal attention.
    """
    q, k, values = x[:, 1:], x[:, :-1] / x[:, :-1].norm(dim=-1, keepdim=True).clamp_min(_SHORTEST), v[:, :-1]
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), values.transpose(1, 2), is_causal=True)
    return functional.pad(out.transpose(1, 2), (0, 0, 0, 0, 1, 0))
