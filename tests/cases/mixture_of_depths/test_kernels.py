"""Selecting tokens from a stream, and attention among them, compared row by row."""

from __future__ import annotations

from itertools import accumulate

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dynmo.cases.mixture_of_depths.kernels import attend_packed, select
from tests.cases.token_rows import chosen, compare, places, random, sizes, slowly


@given(chosen, st.integers(1, 3))
def test_selected_rows_and_their_gradients(taken: list[bool], features: int) -> None:
    x, index = random(len(taken), features).requires_grad_(), places(taken)
    stream, selected = select(x, index)
    assert torch.equal(stream, x)
    wanted = [x[place].tolist() for place, is_taken in enumerate(taken) if is_taken]
    assert selected.tolist() == wanted
    to_stream, to_selected = random(*stream.shape, seed=1), random(*selected.shape, seed=2)
    torch.autograd.backward((stream, selected), (to_stream, to_selected))
    rows = iter(to_selected)
    pairs = zip(to_stream, taken, strict=True)
    expected = [x + next(rows) if is_taken else x for x, is_taken in pairs]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.stack(expected))


def test_select_with_one_unused_output() -> None:
    index = torch.tensor([0, 2])
    for used, expected in ((0, [1.0, 1.0, 1.0]), (1, [1.0, 0.0, 1.0])):
        x = random(3, 1).requires_grad_()
        select(x, index)[used].sum().backward()
        assert x.grad is not None
        assert x.grad.flatten().tolist() == expected


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


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 2), sizes)
@example([0, 0], 2, 4)
@example([3, 0, 1], 2, 4)
def test_packed_rows_attend_within_themselves(lengths: list[int], heads: int, size: int) -> None:
    compare_packed(heads, size, lengths)


def test_low_precision_attention_is_close() -> None:
    compare_packed(2, 8, [5, 5], torch.bfloat16, tolerance=0.03)
    compare_packed(2, 8, [5, 0, 3], torch.bfloat16, tolerance=0.03)
