"""Attention with dropped queries and keys, compared with masked dense attention."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dynmo.cases.sparse_attention.dropped import draw_kept, drop_attention, plan_kept
from tests.cases.sparse_attention.masked import Shape, before, check, shapes


def seen_of_kept(batch: int, sequence: int, queries: Tensor, keys: Tensor) -> Tensor:
    heads = queries.shape[0]
    stays = torch.zeros(2, heads, sequence, dtype=torch.bool)
    stays[0].scatter_(1, queries, True)
    stays[1].scatter_(1, keys, True)
    return stays[0][None, :, :, None] & stays[1][None, :, None, :] & before(batch, sequence, heads)


@given(shapes, st.floats(0, 0.99), st.integers(1, 40))
@example((2, 33, 2, 8), 0.0, 32)
def test_dropped_attention_equals_masked_dense_attention(
    shape: Shape, dropped: float, tile: int
) -> None:
    queries, keys = draw_kept(shape[2], shape[1], dropped, seed=3)
    seen = seen_of_kept(*shape[:2], queries, keys)
    check(lambda x, v: drop_attention(x, v, queries, keys, tile), seen, shape)


@given(st.integers(0, 2**62), st.integers(1, 40), st.floats(0, 0.999))
def test_draws_follow_from_the_seed(seed: int, sequence: int, dropped: float) -> None:
    torch.rand(1)  # whatever state the default generator is in
    first, second = draw_kept(2, sequence, dropped, seed), draw_kept(2, sequence, dropped, seed)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert (a.diff() > 0).all()
        assert 0 <= a.min() <= a.max() < sequence
        assert a.shape == (2, max(1, round((1 - dropped) * sequence)))


def test_dropped_pairs_are_not_computed() -> None:
    queries, keys = draw_kept(4, 512, 0.5, 0)
    plan = plan_kept(2, 512, queries, keys, 32, torch.float32)
    pairs = int(seen_of_kept(2, 512, queries, keys).sum())
    assert pairs < 8 * sum((t.stop - t.start) * t.end for t in plan.tiles) < 1.3 * pairs
    assert 0.2 < pairs / (8 * 512 * 511 / 2) < 0.3
