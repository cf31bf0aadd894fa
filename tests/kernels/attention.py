"""Sparse attention against all pairs with a mask: what the tests of its kinds share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

torch.set_num_threads(1)  # as a rank has them

shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 70), st.integers(1, 3), st.sampled_from([1, 2, 4, 8, 24])
)
"""batch, sequence, heads, size"""


def reference(x: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Every pair is computed, and those not in `seen` [batch, heads, query, key] masked away. A row
    without any gives 0."""
    q, k, values = (
        x.transpose(1, 2),
        (x / x.norm(dim=-1, keepdim=True)).transpose(1, 2),
        v.transpose(1, 2),
    )
    scores = (q @ k.mT / x.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    some = seen.any(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(~some, 0.0), -1) * some
    return (weights @ values).transpose(1, 2)


def before(batch: int, sequence: int, heads: int) -> Tensor:
    return (
        torch.ones(sequence, sequence, dtype=torch.bool)
        .tril(-1)
        .expand(batch, heads, sequence, sequence)
    )


def inputs(
    batch: int,
    sequence: int,
    heads: int,
    size: int,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """x, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    x, v, g = (
        torch.randn(batch, sequence, heads, size, generator=generator, dtype=dtype)
        for _ in range(3)
    )
    return x, v, g


def check(
    ours: Callable[[Tensor, Tensor], Tensor],
    seen: Tensor,
    shape: tuple[int, int, int, int],
    tolerance: float = 1e-11,
) -> None:
    x, v, g = inputs(*shape)
    results: list[tuple[Tensor, ...]] = []
    for attend in (ours, lambda x, v: reference(x, v, seen)):
        leaves = [t.clone().requires_grad_() for t in (x, v)]
        out = attend(*leaves)
        out.backward(g)
        results.append((out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)))
    for name, actual, expected in zip(
        ("values", "gradient of x", "gradient of v"), *results, strict=True
    ):
        torch.testing.assert_close(
            actual,
            expected,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, name=name: f"{name}: {m}",
        )
