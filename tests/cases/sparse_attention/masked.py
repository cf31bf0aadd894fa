"""Helpers that compare sparse attention with all pairs under a mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

Attend = Callable[[Tensor, Tensor], Tensor]
Shape = tuple[int, int, int, int]
sizes = st.sampled_from([1, 2, 8])
shapes = st.tuples(st.integers(1, 2), st.integers(1, 33), st.integers(1, 3), sizes)
"""batch, sequence, heads, size"""


def reference(x: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Dense attention of the pairs in `seen`, [batch, heads, query, key]. Others are masked."""
    q = x.transpose(1, 2)
    k = (x / x.norm(dim=-1, keepdim=True)).transpose(1, 2)
    values = v.transpose(1, 2)
    scores = (q @ k.mT / x.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~some, 0.0), -1) * some
    return (weights @ values).transpose(1, 2)


def before(batch: int, sequence: int, heads: int) -> Tensor:
    """A mask [batch, heads, query, key] that is True for each key before its query."""
    one = torch.ones(sequence, sequence, dtype=torch.bool).tril(-1)
    return one.expand(batch, heads, sequence, sequence)


def inputs(
    *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws x, v and the gradient of the output, [batch, sequence, heads, size]."""
    draws = torch.Generator().manual_seed(seed)
    x, v, g = (torch.randn(*shape, generator=draws, dtype=dtype) for _ in range(3))
    return x, v, g


def run(attend: Attend, x: Tensor, v: Tensor, g: Tensor) -> dict[str, Tensor]:
    """Values and gradients, on the CPU."""
    x, v = (t.detach().clone().requires_grad_() for t in (x, v))
    out = attend(x, v)
    gradients = torch.autograd.grad(out, (x, v), g)
    names = ("values", "gradient of x", "gradient of v")
    return {k: t.detach().cpu() for k, t in zip(names, (out, *gradients), strict=True)}


def check(ours: Attend, seen: Tensor, shape: Shape) -> None:
    drawn = inputs(*shape)
    expected = run(lambda x, v: reference(x, v, seen), *drawn)
    torch.testing.assert_close(run(ours, *drawn), expected, rtol=1e-11, atol=1e-11)
