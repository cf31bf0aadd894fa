"""Attributes that a forward writes to and that are not buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from dynmo.models.gpt import FeedForwardHalf
from dynmo.runtime.layer.plain_state import PlainState


class Inner(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 1000
        self.items: list[object] = [torch.ones(1)]
        self.table = torch.full((2,), torch.nan)
        self.other: object = object()

    def leave(self) -> None:
        """Nothing of this is plain state, or it stays the same."""
        self.train()
        self.register_buffer("seen", torch.ones(1))
        self.register_forward_hook(lambda *_: None)
        self.weight.data.add_(1)
        self.count, self.table = int("1000"), self.table.clone()


WRITES: dict[str, Callable[[Inner], object]] = {
    "count": lambda x: setattr(x, "count", 1001),
    "items": lambda x: x.items.append(1),
    "table": lambda x: x.table.mul_(0).nan_to_num_(),
    "other": lambda x: setattr(x, "other", object()),
    "fresh": lambda x: setattr(x, "fresh", None),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_written_attribute_is_named(name: str) -> None:
    inner = Inner()
    state = PlainState(nn.Sequential(nn.Linear(2, 2), inner))
    inner.leave()
    assert state.written() is None
    WRITES[name](inner)
    assert state.written() == f"1.{name}"


def test_modules_of_dynmo_are_not_watched() -> None:
    half = FeedForwardHalf(2, 0.2, 0.2, dropout=0.0)
    state = PlainState(half)
    vars(half)["own"] = 3
    assert state.written() is None


def test_written_attributes_are_restored() -> None:
    inner = Inner()
    state, other = PlainState(inner), inner.other
    inner.count, inner.other = 5, 6
    state.restore()
    assert (inner.count, inner.other, state.written()) == (1000, other, None)
