"""Sparse causal attention with a query and a key of each position, as transformers' models have.

The kinds are those of `hashed.py` and `dropped.py`, without a vector that is both. A query that
sees no key gives 0.

    hash    queries and keys are sorted by bucket, and within it by position. The keys that a query
            sees then lie side by side. Tiles of queries meet the keys that one of them sees
    drop    tiles of the kept queries meet the kept keys up to the last that one of them sees

A mask of the model, such as one of padding or of a window, leaves out further pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Scoring:
    """How scores become weights. The attributes are those of transformers' attention functions.

    Attributes:
        scaling: Factor of the scores.
        softcap: Bound of the scores, if there is one.
        sinks: A further score of each head, [heads], if there is one.
        dropout: Probability that a weight is dropped.
    """

    scaling: float
    softcap: float | None
    sinks: Tensor | None
    dropout: float


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """Computes some queries, [batch, heads, ..., queries, size]. `seen` says which keys they see.

    Masked softmax in float32, as the attention of transformers' own code ("eager").
    """
    scores = (q @ k.mT).float() * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if scoring.sinks is not None:
        shape = (1, -1, *[1] * (scores.dim() - 2))
        sinks = scoring.sinks.float().view(shape).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    weights = weights.masked_fill(~seen, 0.0)
    return functional.dropout(weights, scoring.dropout).to(v.dtype) @ v


def _rows(x: Tensor, places: Tensor, heads: int) -> Tensor:
    """Returns rows of x, [batch, heads of x, tokens, size].

    Args:
        places: int64 [batch, heads, ...], places among the tokens.
        heads: Number of heads. Several may share a head of x.
    """
    batch, own, tokens, size = x.shape
    shared = torch.arange(heads, device=x.device) // (heads // own)
    first = (torch.arange(batch, device=x.device)[:, None] * own + shared) * tokens
    index = places + first.view(batch, heads, *[1] * (places.dim() - 2))
    return x.reshape(-1, size).index_select(0, index.flatten()).view(*places.shape, size)


def _masked(seen: Tensor, mask: Tensor | None, queries: Tensor, keys: Tensor) -> Tensor:
    """Leaves out of `seen` what the mask of the model leaves out.

    Args:
        mask: bool [batch, 1 or heads, tokens, tokens].
        queries: Places of the queries, int64 [batch, heads, ..., queries].
        keys: Places of the keys, int64 [batch, heads, ..., keys].
    """
    if mask is None:
        return seen
    shape = (-1, *[1] * (queries.dim()))
    batch = torch.arange(queries.shape[0], device=mask.device).view(shape)
    heads = torch.arange(queries.shape[1], device=mask.device).view(1, *shape[:-1])
    return seen & mask[batch, heads % mask.shape[1], queries[..., None], keys[..., None, :]]


def hash_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    directions: Tensor,
    tile: int,
    how: Scoring,
) -> Tensor:
    """Attends to the keys in the bucket of each query.

    Args:
        q: [batch, heads, tokens, size].
        k: [batch, key heads, tokens, size].
        v: [batch, key heads, tokens, value size].
        mask: bool [batch, 1 or heads, tokens, tokens], or None.
        directions: [key heads, size, buckets / 2].
        tile: Queries that are computed together.

    Returns:
        [batch, heads, tokens, value size].
    """
    batch, heads, tokens, _ = q.shape
    groups = heads // k.shape[1]
    with torch.no_grad():
        by_query = _in_buckets(q, directions.repeat_interleave(groups, 0))
        by_key = _in_buckets(k, directions).repeat_interleave(groups, 1)
        end = torch.searchsorted(by_key, by_query, right=True)
        begin = torch.searchsorted(by_key, by_query - by_query % tokens)
        # The last tile has its last query several times.
        tiles = -(-tokens // tile)
        places = torch.arange(tiles * tile, device=q.device).clamp_max(tokens - 1)
        queries, begin, end = (
            x[..., places].view(batch, heads, tiles, tile) for x in (by_query % tokens, begin, end)
        )
        first = begin[..., :1]
        width = max(1, int((end[..., -1:] - first).max()))
        at = first + torch.arange(width, device=q.device)
        keys = (by_key % tokens).gather(2, at.clamp_max(tokens - 1).flatten(2)).view(at.shape)
        at = at[..., None, :]
        seen = _masked((at >= begin[..., None]) & (at < end[..., None]), mask, queries, keys)
        back = torch.empty_like(by_query)
        back.scatter_(2, by_query % tokens, places[:tokens].expand_as(by_query))
    out = _attend(_rows(q, queries, heads), _rows(k, keys, heads), _rows(v, keys, heads), seen, how)
    return _rows(out.flatten(2, 3), back, heads)


def _in_buckets(x: Tensor, directions: Tensor) -> Tensor:
    """Returns bucket * tokens + place of each position, ascending, int64 [batch, heads, tokens]."""
    z = x.float() @ directions.float()
    buckets = torch.cat((z, -z), -1).argmax(-1)
    places = torch.arange(x.shape[2], device=x.device)
    return (buckets * x.shape[2] + places).sort(-1).values


def drop_pairs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    kept: tuple[Tensor, Tensor],
    tile: int,
    how: Scoring,
) -> Tensor:
    """Attends from the kept queries to the kept keys. The arguments are those of `hash_pairs`.

    Args:
        kept: Places of the kept queries and of the kept keys, int64 [key heads, kept], ascending,
            in host memory.
    """
    batch, heads, tokens, _ = q.shape
    queries, keys = (x.repeat_interleave(heads // k.shape[1], 0) for x in kept)
    before = torch.searchsorted(keys, queries, right=True)
    ends = [int(x.max()) for x in before.split(tile, 1)]
    queries, keys = (x.to(q.device).expand(batch, *x.shape) for x in (queries, keys))
    parts = list[Tensor]()
    for part, end in zip(queries.split(tile, 2), ends, strict=True):
        at = keys[..., : max(1, end)]
        seen = _masked(at[..., None, :] <= part[..., None], mask, part, at)
        parts.append(
            _attend(_rows(q, part, heads), _rows(k, at, heads), _rows(v, at, heads), seen, how)
        )
    out = v.new_zeros(batch, heads, tokens, v.shape[-1])
    return out.scatter(
        2, queries[..., None].expand(*queries.shape, v.shape[-1]), torch.cat(parts, 2)
    )
