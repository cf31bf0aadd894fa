"""Balanced assignment: equal numbers of tokens per expert, and the best scores."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynmo.cases.experts.routing import auction, sinkhorn

SLACK = 1e-3


def drawn(tokens: int, experts: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 7), st.integers(1, 4), st.integers(0, 999))
def test_the_auction_finds_the_best_assignment(tokens: int, experts: int, seed: int) -> None:
    scores = drawn(tokens, experts, seed).round(decimals=1)
    got = auction(scores, SLACK)
    counts = torch.bincount(got, minlength=experts)
    room = [tokens // experts + (expert < tokens % experts) for expert in range(experts)]
    assert counts.tolist() == room
    places = [expert for expert, count in enumerate(room) for _ in range(count)]
    orders = set(permutations(places))
    best = max(sum(float(scores[i, e]) for i, e in enumerate(order)) for order in orders)
    assert float(scores.gather(1, got[:, None]).sum()) >= best - SLACK * tokens - 1e-5


def test_the_auction_ends_with_equal_scores() -> None:
    assert torch.bincount(auction(torch.zeros(64, 8))).tolist() == [8] * 8
    hot = torch.zeros(64, 8)
    hot[:, 3] = 100.0
    assert torch.bincount(auction(hot)).tolist() == [8] * 8


@given(st.integers(1, 40), st.integers(1, 8), st.integers(0, 999), st.floats(0.1, 5))
def test_sinkhorn_has_equal_sums(tokens: int, experts: int, seed: int, spread: float) -> None:
    """Rows have exactly equal sums, and columns nearly."""
    scaled = sinkhorn(spread * drawn(tokens, experts, seed))
    torch.testing.assert_close(scaled.sum(1), torch.full((tokens,), 1 / tokens))
    assert scaled.sum(0).tolist() == pytest.approx([1 / experts] * experts, rel=0.05)


def test_sinkhorn_of_large_scores_is_finite() -> None:
    scores = torch.tensor([[1e4, 0.0], [1e4, 0.0]])
    assert torch.isfinite(sinkhorn(scores)).all()
    assert sinkhorn(torch.zeros(0, 3)).shape == (0, 3)


def test_sinkhorn_normalises_rows_and_columns_in_turn() -> None:
    scores = drawn(64, 8)
    reference = scores.double().exp()
    for _ in range(100):
        reference = reference / reference.sum(1, keepdim=True) / 64
        reference = reference / reference.sum(0) / 8
    torch.testing.assert_close(sinkhorn(scores).double(), reference, rtol=1e-2, atol=1e-7)
    torch.testing.assert_close(sinkhorn(scores).topk(2).indices, reference.topk(2).indices)


def test_more_rounds_even_the_sums() -> None:
    scores = 3 * drawn(64, 8)
    sums = [float(sinkhorn(scores, rounds, 0.0).sum(0).max()) for rounds in (1, 3, 30)]
    assert sums == sorted(sums, reverse=True)
    assert sums[-1] == pytest.approx(1 / 8, rel=1e-3)
