"""What a forward writes to: buffers, whose values are saved and restored, and attributes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.cases.pruning.crossover import make_pruned
from dynmo.models.gpt import FeedForwardHalf
from dynmo.models.options import ModelOptions
from dynmo.runtime.layer.buffers import BufferSet, has_same_bits
from dynmo.runtime.layer.writes import PlainState


class Writing(nn.Module):
    count: Tensor
    grown: Tensor
    created: Tensor | None
    unseen: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("grown", torch.ones(2))
        self.register_buffer("large", torch.ones(5))
        self.register_buffer("created", None)
        self.register_buffer("removed", torch.ones(1))
        self.register_buffer("unseen", torch.ones(2), persistent=False)
        self.register_buffer("mean", torch.full((2,), torch.nan))

    def write(self) -> None:
        """Writes in place, by putting another tensor there, and without a new version."""
        self.count.add_(1)
        self.grown = torch.cat([self.grown, self.grown[-1:] + 1])
        self.created = torch.ones(3) if self.created is None else self.created + 1
        self.removed = None
        self.unseen.numpy()[0] += 1
        mean = self.mean.nan_to_num_(1.0)
        functional.batch_norm(torch.randn(4, 2), mean, torch.ones(2), training=True)

    @property
    def now(self) -> dict[str, object]:
        return {
            name: None if b is None else b.nan_to_num(7.0).tolist()
            for name, b in self._buffers.items()
        }


def test_restore_resets_the_buffers_of_a_step() -> None:
    module = Writing()
    buffers = BufferSet([module])
    for _ in range(2):
        before, copies = module.now, buffers.copies()
        module.write()
        assert module.now != before
        buffers.restore(copies)
        assert module.now == before
        module.write()


def test_recompute_sees_old_buffers_and_keeps_new_ones() -> None:
    module = Writing()
    buffers = BufferSet([module])
    first, copies = module.now, buffers.copies()
    module.write()
    written = buffers.written(copies)
    names = ["count", "created", "grown", "mean", "removed", "unseen"]
    assert sorted(key.name for key in written) == names, "large is not kept"
    assert buffers.written(copies, waits=False).keys() == written.keys()
    now, kept = module.now, module.count
    for _ in range(2):
        with buffers.replaced(written):
            assert module.now == first, "also the second time: what is written within is lost"
            module.write()
        assert module.now == now
        assert module.count is kept, "autograd may need it"
    assert buffers.first_of(written, persistent=True) == "count"
    assert buffers.first_of((x for x in written if x.name == "unseen"), persistent=True) is None


def test_buffers_of_sparse_weights_are_not_copied() -> None:
    pruned = [make_pruned(4, 4, 0.5, sparse=sparse) for sparse in (True, False)]
    assert all(list(module.buffers()) for module in pruned)
    assert not BufferSet(pruned).copies()


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float32, torch.complex64, torch.complex128]
)
def test_same_bits_compares_any_dtype(dtype: torch.dtype) -> None:
    a = torch.zeros(3, 2).to(dtype)
    assert has_same_bits(a, torch.zeros(2, 3).to(dtype).t())
    assert has_same_bits(a[0, 0], a[1, 1])
    assert has_same_bits(a[:0], a[:0])
    assert not has_same_bits(a, a[:2])
    assert not has_same_bits(a, torch.ones(3, 2).to(dtype))
    if dtype.is_floating_point:
        assert not has_same_bits(a, -a), "zeros have a sign"
        assert has_same_bits(a / 0, a / 0)
    assert not has_same_bits(a, torch.zeros(3, 2, dtype=torch.int8))


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
    half = FeedForwardHalf(ModelOptions(hidden=2, heads=1, init_std=0.2))
    state = PlainState(half)
    vars(half)["own"] = 3
    assert state.written() is None


def test_written_attributes_are_restored() -> None:
    inner = Inner()
    state, other = PlainState(inner), inner.other
    inner.count, inner.other = 5, 6
    state.restore()
    assert (inner.count, inner.other, state.written()) == (1000, other, None)
