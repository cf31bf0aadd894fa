"""Selecting tokens from a stream and merging them back, compared row by row."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dynmo.kernels.token_select import merge, select

chosen = st.lists(st.booleans(), min_size=1, max_size=12)
"""True for each token that is taken."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def places(taken: list[bool], value: bool = True) -> Tensor:
    found = [place for place, is_taken in enumerate(taken) if is_taken is value]
    return torch.tensor(found, dtype=torch.int64)


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
