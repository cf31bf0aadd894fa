"""Attention of some tokens, compared with a computation by single tokens."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dynmo.cases.early_exit.kernels import attend_kept, merge, plan_tiles
from tests.cases.token_rows import chosen, compare, drawn, places, random, shapes, shares, slowly


def compare_kept(
    shape: tuple[int, int, int, int],
    index: Tensor,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-11,
) -> None:
    batch, sequence, heads, size = shape
    q = random(len(index), heads, size, seed=1, dtype=dtype)
    k, v = (random(batch, sequence, heads, size, seed=seed, dtype=dtype) for seed in (2, 3))
    seen = [range(i - i % sequence, i + 1) for i in index.tolist()]
    compare(lambda q, k, v: attend_kept(q, k, v, index), slowly(seen), q, k, v, tolerance)


@given(shapes, shares, st.integers(0, 99))
@example((3, 5, 2, 4), [0.0, 0.0, 0.0], 0)
@example((3, 5, 2, 4), [0.0, 1.0, 0.0], 0)
def test_kept_tokens_attend_like_masked_dense_attention(
    shape: tuple[int, int, int, int], of_row: list[float], seed: int
) -> None:
    compare_kept(shape, drawn(*shape[:2], of_row, seed))


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_kept_tokens_in_several_tiles(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_tiles, "__defaults__", (8,))
    index = drawn(1, 17, [share], 0)
    assert len(plan_tiles(index, torch.float64)) == (2 if share < 1 else 3)
    compare_kept((1, 17, 1, 4), index)


@given(st.sets(st.integers(0, 60)), st.integers(1, 9))
def test_every_query_is_in_one_tile(chosen: set[int], size: int) -> None:
    """Each query sees its own position and all earlier ones."""
    positions = sorted(chosen)
    tiles = plan_tiles(torch.tensor(positions, dtype=torch.int64), torch.float64, size)
    queries = [query for tile in tiles for query in range(tile.start, tile.stop)]
    assert queries == list(range(len(positions)))
    for tile in tiles:
        assert 0 < tile.stop - tile.start <= size
        assert tile.end == positions[tile.stop - 1] + 1, "a query of the tile sees each key"
        assert tile.rows is None
        assert tile.mask.dtype == torch.float64
        for query in range(tile.start, tile.stop):
            mask = tile.mask[query - tile.start].tolist()
            assert len(mask) == tile.end - tile.masked_from
            assert set(mask) <= {0.0, -float("inf")}
            unmasked = [tile.masked_from + j for j, added in enumerate(mask) if added == 0]
            assert [*range(tile.masked_from), *unmasked] == list(range(positions[query] + 1))
    if tiles:
        assert tiles[-1].end == max(tile.end for tile in tiles)


def test_low_precision_attention_is_close() -> None:
    compare_kept((2, 9, 2, 8), drawn(2, 9, [0.5, 0.9], 0), torch.bfloat16, tolerance=0.03)


@given(chosen, st.integers(1, 3))
def test_merged_rows_and_their_gradients(in_first: list[bool], features: int) -> None:
    at_first, at_second = places(in_first), places(in_first, False)
    first = random(len(at_first), features).requires_grad_()
    second = random(len(at_second), features, seed=1).requires_grad_()
    out = merge(first, at_first, second, at_second)
    rows = iter(first), iter(second)
    expected = torch.stack([next(rows[0] if is_first else rows[1]) for is_first in in_first])
    assert torch.equal(out, expected)
    gradient = random(*out.shape, seed=2)
    ours = torch.autograd.grad(out, (first, second), gradient)
    assert all(map(torch.equal, ours, (gradient[at_first], gradient[at_second])))


@given(chosen, st.randoms(use_true_random=False))
def test_merge_takes_rows_in_any_order(in_first: list[bool], shuffler: Random) -> None:
    """Tokens that exit later come last, at any place of the stream."""
    order = places(in_first, False).tolist()
    shuffler.shuffle(order)
    at_first, at_second = places(in_first), torch.tensor(order, dtype=torch.int64)
    out = merge(random(len(at_first), 2), at_first, random(len(order), 2, seed=1), at_second)
    assert torch.equal(out[at_first], random(len(at_first), 2))
    assert torch.equal(out[at_second], random(len(order), 2, seed=1))
