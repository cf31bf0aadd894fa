"""The tree of sums depends neither on replicas, nor on whether B or W is ahead."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from dynmo.balance.meshes import accumulation_problem
from dynmo.cost.layer_cost import most_pending_gradients
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.accumulation import AccumulationGroups, Tree
from dynmo.runtime.layer.split_backward import Layer


def total(tensors: Sequence[Tensor | None]) -> Tensor | None:
    tree = Tree()
    for place, tensor in enumerate(tensors):
        tree.put(place, None if tensor is None else tensor.clone())
    return tree.total(len(tensors))


def written_out(tensors: Sequence[Tensor]) -> Tensor:
    """Neighbours merge. A sum without one is folded in, from the last to the first."""
    left: list[Tensor] = []
    level = list(tensors)
    while level:
        if len(level) % 2:
            left.append(level.pop())
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    # `left` begins with what came last.
    out = left[0]
    for part in left[1:]:
        out = part + out
    return out


def rows(count: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=random) * 10 ** (i % 5) for i in range(count)]


@given(st.integers(1, 40), st.integers(0, 9))
def test_sum_follows_the_tree_of_the_docstring(count: int, seed: int) -> None:
    got = total(rows(count, seed))
    assert got is not None
    assert torch.equal(got, written_out(rows(count, seed)))


@given(st.integers(1, 40))
def test_pending_gradients_match_the_count(count: int) -> None:
    """At most the predicted number of gradients is pending while a slot is summed."""
    waiting: list[int] = []
    tree = Tree()
    for place in range(count):
        waiting.append(len(tree._parts))
        tree.put(place, torch.ones(1))
    assert max(waiting) == most_pending_gradients(count)


@given(st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
def test_any_valid_number_of_replicas_gives_the_same_bits(
    replicas: int, exponent: int, seed: int
) -> None:
    """Each replica folds its own slots. Then the sums of replicas are folded in order."""
    each = 2**exponent
    groups = rows(replicas * each, seed)
    assert accumulation_problem(len(groups), replicas, len(groups)) is None
    alone = total(groups)
    apart = total([total(groups[r * each :][:each]) for r in range(replicas)])
    assert alone is not None
    assert apart is not None
    assert torch.equal(alone, apart)


def test_a_missing_tensor_counts_as_zeros() -> None:
    a, zeros = torch.tensor([1.5, -0.0]), torch.zeros(2)
    for tensors in ([a, None], [None, a], [None, None, a], [a, None, None, None, None]):
        got = total(tensors)
        expected = total([zeros if t is None else t for t in tensors])
        assert got is not None
        assert expected is not None
        assert got.numpy().tobytes() == expected.numpy().tobytes(), tensors
    assert total([None, None, None]) is None
    late = Tree()
    late.put(2, a.clone())
    got = late.total(4)
    assert got is not None
    assert got.tolist() == [1.5, 0]


@pytest.mark.parametrize(
    ("groups", "replicas", "microbatches", "problem"),
    [
        (1, 1, 5, None),
        (5, 1, 5, None),
        (6, 3, 12, None),
        (4, 1, 8, None),
        (3, 1, 8, "does not divide the 8 microbatches of a step"),
        (6, 2, 12, "is not 2 (replicas) times a power of two"),
        (2, 4, 8, "is not 4 (replicas) times a power of two"),
    ],
)
def test_invalid_numbers_of_groups_are_reported(
    groups: int, replicas: int, microbatches: int, problem: str | None
) -> None:
    assert accumulation_problem(groups, replicas, microbatches) == problem


class Mixed(nn.Module):
    """A gradient of W's, one of B's, a late one and none. `by_itself` makes the first B's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.line = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.late = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.calls, self.by_itself = 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        line = self.line
        x = functional.linear(x, line.weight, line.bias) if self.by_itself else line(x)
        x = self.norm(torch.tanh(x))
        return self.late(x) if self.calls > 2 else x


MICROBATCHES = 8


def gradients(order: str, count: int) -> dict[str, Tensor | None]:
    """Gradients in step 2. `order` has b and w (the next of each) and x (both at once)."""
    module = Mixed()
    done: list[int] = []
    groups = AccumulationGroups(
        list(module.parameters()), MICROBATCHES, count, lambda: done.append(1)
    )
    layer = Layer(0, module, HostClock(), 1, groups=groups)
    random = torch.Generator().manual_seed(2)
    for step in range(2):
        module.zero_grad()
        layer.begin()
        module.calls, module.by_itself = 0, not step
        for j in range(MICROBATCHES):
            layer.forward(j, (torch.randn(4, 6, generator=random),), step, True, True, None)
        b = w = 0
        for kind in order:
            if kind == "w":
                layer.backward_weight(w)
            else:
                layer.backward_input(
                    b,
                    (torch.randn(4, 6, generator=torch.Generator().manual_seed(b)),),
                    deferred=kind == "b",
                )
            b, w = b + (kind != "w"), w + (kind != "b")
            assert len(done) == step + (w == MICROBATCHES), "told once, at the last W"
    return {name: p.grad for name, p in module.named_parameters()}


def plain(count: int) -> dict[str, Tensor | None]:
    """A fresh sum for every slot, and the sums folded."""
    module = Mixed()
    layer = Layer(0, module, HostClock(), 1)
    random = torch.Generator().manual_seed(2)
    inputs = [torch.randn(4, 6, generator=random) for _ in range(2 * MICROBATCHES)][MICROBATCHES:]
    each: dict[str, list[Tensor | None]] = {name: [] for name, _ in module.named_parameters()}
    for j, x in enumerate(inputs):
        if j % (MICROBATCHES // count) == 0:
            module.zero_grad()
        layer.forward(j, (x,), 1, True, True, None)
        layer.backward_input(
            j, (torch.randn(4, 6, generator=torch.Generator().manual_seed(j)),), deferred=False
        )
        if (j + 1) % (MICROBATCHES // count) == 0:
            for name, p in module.named_parameters():
                each[name].append(None if p.grad is None else p.grad.clone())
    return {name: total(parts) for name, parts in each.items()}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "order",
    [
        "x" * 8,
        "bw" * 8,
        "b" * 8 + "w" * 8,
        "bbb" + "bw" * 5 + "www",
        "bbw" + "x" * 0 + "bw" * 6 + "w",
    ],
)
def test_b_ahead_of_w_keeps_the_order_of_sums(order: str, count: int) -> None:
    """Norms end a slot at B, and linears end it at W."""
    got, expected = gradients(order, count), plain(count)
    for name, value in expected.items():
        actual = got[name]
        if value is None:
            assert actual is None, name
        else:
            assert actual is not None, name
            assert torch.equal(actual, value), name
    assert got["never.weight"] is None
    assert got["late.weight"] is not None
