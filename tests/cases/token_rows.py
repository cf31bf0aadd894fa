"""Attention of some tokens, computed by single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.models.plain_blocks import attended

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

sizes = st.sampled_from([1, 2, 8])
shapes = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 2), sizes)
"""batch, sequence, heads, size"""
shares = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=3, max_size=3)
"""Shares of the tokens of each row that are drawn."""


chosen = st.lists(st.booleans(), min_size=1, max_size=12)
"""True for each token that is taken."""


def drawn(batch: int, sequence: int, of_row: Sequence[float], seed: int) -> Tensor:
    """Index of each drawn token, ascending."""
    chances = torch.rand(batch, sequence, generator=torch.Generator().manual_seed(seed))
    return (chances < torch.tensor(of_row)[:batch, None]).flatten().nonzero().squeeze(1)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draws, dtype=torch.float64).to(dtype)


def places(taken: list[bool], value: bool = True) -> Tensor:
    found = [place for place, is_taken in enumerate(taken) if is_taken is value]
    return torch.tensor(found, dtype=torch.int64)


def slowly(seen: Sequence[range]) -> Attention:
    """Each query attends to its own range of the keys, whose rows are one after the other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = 0 * q
        k, v = k.flatten(0, -3), v.flatten(0, -3)
        for place, keys in enumerate(seen):
            for head in range(k.shape[1]):
                earlier = [(k[j, head], v[j, head]) for j in keys]
                out[place, head] = attended(q[place, head], *zip(*earlier, strict=True))
        return out

    return attend


def compare(
    ours: Attention, slow: Attention, q: Tensor, k: Tensor, v: Tensor, tolerance: float = 1e-11
) -> None:
    """Values and gradients. Those of low precision are compared with the slow ones in float64."""
    g, results = random(*q.shape, seed=9, dtype=q.dtype), []
    for attend, dtype in ((ours, q.dtype), (slow, torch.float64)):
        leaves = [x.to(dtype).clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        out.backward(g.to(dtype))
        # A leaf that no output depends on may be left without a gradient.
        given = (torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)
        results.append(dict(zip(("values", "q", "k", "v"), (out.detach(), *given), strict=True)))
        assert all(x.dtype == dtype for x in results[-1].values())
    ours_, theirs = ({name: x.double() for name, x in each.items()} for each in results)
    torch.testing.assert_close(ours_, theirs, rtol=tolerance, atol=tolerance)
