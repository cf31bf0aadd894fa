"""Attention of some tokens, compared with a computation by single tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dynmo.kernels.token_attention import attend_kept, attend_packed, plan_tiles, row_lengths
from tests.kernels.attention import Shape, sizes
from tests.models.plain_blocks import attended

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

shapes = st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 2), sizes)
"""batch, sequence, heads, size"""
shares = st.lists(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]), min_size=3, max_size=3)
"""Shares of the tokens of each row that are drawn."""


def drawn(batch: int, sequence: int, of_row: Sequence[float], seed: int) -> Tensor:
    """Index of each drawn token, ascending."""
    chances = torch.rand(batch, sequence, generator=torch.Generator().manual_seed(seed))
    return (chances < torch.tensor(of_row)[:batch, None]).flatten().nonzero().squeeze(1)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draws, dtype=torch.float64).to(dtype)


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


def compare_kept(
    shape: Shape,
    index: Tensor,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-11,
) -> None:
    batch, sequence, heads, size = shape
    q = random(len(index), heads, size, seed=1, dtype=dtype)
    k, v = (random(batch, sequence, heads, size, seed=seed, dtype=dtype) for seed in (2, 3))
    seen = [range(i - i % sequence, i + 1) for i in index.tolist()]
    compare(lambda q, k, v: attend_kept(q, k, v, index), slowly(seen), q, k, v, tolerance)


def compare_packed(
    heads: int,
    size: int,
    lengths: list[int],
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-11,
) -> None:
    q, k, v = (random(sum(lengths), heads, size, seed=seed, dtype=dtype) for seed in (1, 2, 3))
    starts = [end - n for end, n in zip(accumulate(lengths), lengths, strict=True)]
    seen = [range(s, s + i + 1) for s, n in zip(starts, lengths, strict=True) for i in range(n)]
    compare(lambda q, k, v: attend_packed(q, k, v, lengths), slowly(seen), q, k, v, tolerance)


@given(shapes, shares, st.integers(0, 99))
@example((3, 5, 2, 4), [0.0, 0.0, 0.0], 0)
@example((3, 5, 2, 4), [0.0, 1.0, 0.0], 0)
def test_kept_tokens_attend_like_masked_dense_attention(
    shape: Shape, of_row: list[float], seed: int
) -> None:
    compare_kept(shape, drawn(*shape[:2], of_row, seed))


@pytest.mark.parametrize("share", [0.6, 1.0])
def test_kept_tokens_in_several_tiles(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_tiles, "__defaults__", (8,))
    index = drawn(1, 17, [share], 0)
    assert len(plan_tiles(index, torch.float64)) == (2 if share < 1 else 3)
    compare_kept((1, 17, 1, 4), index)


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 2), sizes)
@example([0, 0], 2, 4)
@example([3, 0, 1], 2, 4)
def test_packed_rows_attend_within_themselves(lengths: list[int], heads: int, size: int) -> None:
    compare_packed(heads, size, lengths)


def test_low_precision_attention_is_close() -> None:
    compare_kept((2, 9, 2, 8), drawn(2, 9, [0.5, 0.9], 0), torch.bfloat16, tolerance=0.03)
    compare_packed(2, 8, [5, 5], torch.bfloat16, tolerance=0.03)
    compare_packed(2, 8, [5, 0, 3], torch.bfloat16, tolerance=0.03)


@given(shapes, shares, st.integers(0, 99))
def test_row_lengths_count_the_kept_tokens(shape: Shape, of_row: list[float], seed: int) -> None:
    batch, sequence, *_ = shape
    index = drawn(batch, sequence, of_row, seed)
    rows = [token // sequence for token in index.tolist()]
    assert row_lengths(index, batch, sequence) == [rows.count(row) for row in range(batch)]


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
