"""Hash-sparse attention on CUDA, by Triton.

It agrees with `hashed.py` to 1e-6 in float32, values and gradients.

Rows are sorted by bucket (stable, so by position within one). A tile of queries meets only the
tiles of keys from its first row's bucket on up to itself. In B a tile of keys meets the tiles of
queries up to the end of its last row's bucket. B computes the weights again from the logarithm of
their sum.

                 keys  | bucket 0 | bucket 1 | bucket 2
    tile of queries a       #
    tile of queries b       #  #  .  #              b begins in bucket 0 and ends in bucket 1
    tile of queries c                #  #           # computed
"""

# Triton is absent on machines without CUDA, and has no types.
# pyright: basic, reportMissingImports=false, reportOptionalMemberAccess=false, reportIndexIssue=false, reportInvalidTypeForm=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dynmo.extend import ConfigError

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

_TILE = 64


def _jit(function: Any) -> Any:
    return function if triton is None else triton.jit(function)


@_jit
def _forward(qs, ks, vs, begins, out, logs, n, size, TILE: tl.constexpr, WIDTH: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * n
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    here = (i[:, None] < n) & (column[None, :] < size)
    q = tl.load(qs + (base + i)[:, None] * size + column[None, :], mask=here, other=0.0)
    begin = tl.load(begins + base + i, mask=i < n, other=n)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, WIDTH], tl.float32)
    for first in range(tl.min(begin, 0), tl.minimum((tl.program_id(0) + 1) * TILE, n), TILE):
        j = first + tl.arange(0, TILE)
        there = (j[:, None] < n) & (column[None, :] < size)
        k = tl.load(ks + (base + j)[:, None] * size + column[None, :], mask=there, other=0.0)
        v = tl.load(vs + (base + j)[:, None] * size + column[None, :], mask=there, other=0.0)
        seen = (j[None, :] >= begin[:, None]) & (j[None, :] < i[:, None])
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(highest - safe)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    # A row that saw no key gives 0.
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + (base + i)[:, None] * size + column[None, :],
        (sums / divisor[:, None]).to(q.dtype),
        mask=here,
    )
    tl.store(logs + base + i, tl.where(total == 0.0, 0.0, highest + tl.log(divisor)), mask=i < n)


@_jit
def _backward_queries(
    qs, ks, vs, gs, begins, logs, deltas, gq, n, size, TILE: tl.constexpr, WIDTH: tl.constexpr
):
    base = tl.program_id(1).to(tl.int64) * n
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    here = (i[:, None] < n) & (column[None, :] < size)
    at = (base + i)[:, None] * size + column[None, :]
    q, g = tl.load(qs + at, mask=here, other=0.0), tl.load(gs + at, mask=here, other=0.0)
    begin = tl.load(begins + base + i, mask=i < n, other=n)
    log = tl.load(logs + base + i, mask=i < n, other=0.0)
    delta = tl.load(deltas + base + i, mask=i < n, other=0.0)
    sums = tl.zeros([TILE, WIDTH], tl.float32)
    for first in range(tl.min(begin, 0), tl.minimum((tl.program_id(0) + 1) * TILE, n), TILE):
        j = first + tl.arange(0, TILE)
        there = (j[:, None] < n) & (column[None, :] < size)
        k = tl.load(ks + (base + j)[:, None] * size + column[None, :], mask=there, other=0.0)
        v = tl.load(vs + (base + j)[:, None] * size + column[None, :], mask=there, other=0.0)
        seen = (j[None, :] >= begin[:, None]) & (j[None, :] < i[:, None])
        weights = tl.where(
            seen, tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") - log[:, None]), 0.0
        )
        gscores = weights * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        sums += tl.dot(gscores.to(k.dtype), k, input_precision="ieee")
    tl.store(gq + at, sums.to(q.dtype), mask=here)


@_jit
def _backward_keys(
    qs,
    ks,
    vs,
    gs,
    begins,
    ends,
    logs,
    deltas,
    gk,
    gv,
    n,
    size,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    base = tl.program_id(1).to(tl.int64) * n
    j = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, WIDTH)
    here = (j[:, None] < n) & (column[None, :] < size)
    at = (base + j)[:, None] * size + column[None, :]
    k, v = tl.load(ks + at, mask=here, other=0.0), tl.load(vs + at, mask=here, other=0.0)
    end = tl.max(tl.load(ends + base + j, mask=j < n, other=0), 0)
    to_k, to_v = tl.zeros([TILE, WIDTH], tl.float32), tl.zeros([TILE, WIDTH], tl.float32)
    for first in range(tl.program_id(0) * TILE, end, TILE):
        i = first + tl.arange(0, TILE)
        there = (i[:, None] < n) & (column[None, :] < size)
        q = tl.load(qs + (base + i)[:, None] * size + column[None, :], mask=there, other=0.0)
        g = tl.load(gs + (base + i)[:, None] * size + column[None, :], mask=there, other=0.0)
        begin = tl.load(begins + base + i, mask=i < n, other=n)
        log = tl.load(logs + base + i, mask=i < n, other=0.0)
        delta = tl.load(deltas + base + i, mask=i < n, other=0.0)
        seen = (j[None, :] >= begin[:, None]) & (j[None, :] < i[:, None])
        weights = tl.where(
            seen, tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") - log[:, None]), 0.0
        )
        gscores = weights * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        to_v += tl.dot(tl.trans(weights.to(g.dtype)), g, input_precision="ieee")
        to_k += tl.dot(tl.trans(gscores.to(q.dtype)), q, input_precision="ieee")
    tl.store(gk + at, to_k.to(k.dtype), mask=here)
    tl.store(gv + at, to_v.to(v.dtype), mask=here)


class _Sorted(torch.autograd.Function):
    """Attention on sorted q, k (scaled) and v, [batch * heads, sequence, size]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, begins: Tensor, ends: Tensor) -> Tensor:
        groups, n, size = q.shape
        out = torch.empty_like(q)
        logs = torch.empty(groups, n, dtype=torch.float32, device=q.device)
        _forward[triton.cdiv(n, _TILE), groups](
            q, k, v, begins, out, logs, n, size, TILE=_TILE, WIDTH=_width(size)
        )
        ctx.save_for_backward(q, k, v, begins, ends, out, logs)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, begins, ends, out, logs = ctx.saved_tensors
        gout = gradients[0].contiguous()
        groups, n, size = q.shape
        deltas = (out.float() * gout.float()).sum(-1)
        gq, gk, gv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        grid, meta = (triton.cdiv(n, _TILE), groups), {"TILE": _TILE, "WIDTH": _width(size)}
        _backward_queries[grid](q, k, v, gout, begins, logs, deltas, gq, n, size, **meta)
        _backward_keys[grid](q, k, v, gout, begins, ends, logs, deltas, gk, gv, n, size, **meta)
        return gq, gk, gv, None, None


def _width(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def hash_attention(x: Tensor, v: Tensor, buckets: Tensor, shortest: float) -> Tensor:
    """Compute `hashed.hash_attention` on CUDA."""
    if triton is None:
        raise ConfigError(
            "sparse attention on CUDA needs Triton; install it, or train on the CPU "
            "(parallel.device = 'cpu')"
        )
    batch, n, heads, size = x.shape
    each = buckets.transpose(1, 2).reshape(batch * heads, n)
    sorted_buckets, order = (t.contiguous() for t in each.sort(dim=-1, stable=True))
    begins = torch.searchsorted(sorted_buckets, sorted_buckets, right=False, out_int32=True)
    ends = torch.searchsorted(sorted_buckets, sorted_buckets, right=True, out_int32=True)
    index = order[..., None].expand(-1, -1, size)
    q, values = (t.transpose(1, 2).reshape(batch * heads, n, size).gather(1, index) for t in (x, v))
    k = q * (size**-0.5 / q.norm(dim=-1, keepdim=True).clamp_min(shortest))
    out = cast(Tensor, _Sorted.apply(q, k, values, begins, ends))
    back = order.argsort(-1)[..., None].expand(-1, -1, size)
    return out.gather(1, back).view(batch, heads, n, size).transpose(1, 2)
