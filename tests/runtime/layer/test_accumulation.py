"""The tree of sums depends neither on replicas, nor on whether B or W is ahead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from dynmo.cost.layer_cost import most_pending_gradients
from dynmo.plan.partition import accumulation_problem
from dynmo.runtime.comm.clock import HostClock
from dynmo.runtime.layer.accumulation import AccumulationGroups, Tree
from dynmo.runtime.layer.layer import Layer
from dynmo.schedule.op import Kind
from tests.runtime.modules import assert_same, draw, gradients_of


def total(tensors: Sequence[Tensor | None]) -> Any:
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
    assert torch.equal(total(rows(count, seed)), written_out(rows(count, seed)))


@given(st.integers(1, 40))
def test_pending_gradients_match_the_count(count: int) -> None:
    """At most the predicted number of gradients is pending while a group is summed."""
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
    """Each replica folds its own groups. Then the sums of replicas are folded in order."""
    each = 2**exponent
    groups = rows(replicas * each, seed)
    assert accumulation_problem(len(groups), replicas, len(groups)) is None
    apart = total([total(groups[r * each :][:each]) for r in range(replicas)])
    assert torch.equal(total(groups), apart)


def test_a_missing_tensor_counts_as_zeros() -> None:
    a, zeros = torch.tensor([1.5, -0.0]), torch.zeros(2)
    for tensors in ([a, None], [None, a], [None, None, a], [a, None, None, None, None]):
        got = total(tensors)
        expected = total([zeros if t is None else t for t in tensors])
        assert got.numpy().tobytes() == expected.numpy().tobytes(), tensors
    assert total([None, None, None]) is None
    late = Tree()
    late.put(2, a.clone())
    got: Any = late.total(4)
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
    """A gradient of W's, one of B's, a late one and none. In step 0 the first is B's, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.line = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.late = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        step, microbatch = divmod(self.calls, MICROBATCHES)
        self.calls += 1
        line = self.line
        x = line(x) if step else functional.linear(x, line.weight, line.bias)
        x = self.norm(torch.tanh(x))
        return self.late(x) if microbatch > 1 else x


MICROBATCHES = 8


def gradients(
    module: nn.Module, order: str, count: int, steps: int = 1
) -> dict[str, Tensor | None]:
    """Gradients of the last step, of inputs [4, 6] and their like.

    `order` has b and w (the next of each) and x (both at once).
    """
    done: list[int] = []
    microbatches = order.count("b") + order.count("x")
    parameters = list(module.parameters())
    groups = AccumulationGroups(parameters, microbatches, count, lambda: done.append(1))
    layer = Layer(0, module, HostClock(), 1, groups=groups)
    random = torch.Generator().manual_seed(2)
    for step in range(steps):
        module.zero_grad()
        layer.begin()
        for j in range(microbatches):
            layer.forward(j, (torch.randn(4, 6, generator=random),), step)
        b = w = 0
        for kind in order:
            if kind in "bx":
                layer.backward_input(b, (draw(b, 4, 6),), deferred=kind == "b")
            else:
                layer.backward_weight(w)
            b, w = b + (kind in "bx"), w + (kind in "wx")
            assert len(done) == step + (w == microbatches), "once, at the last W"
        assert not layer._weight_work
    assert [mark[0] for mark in layer.marks].count(Kind.W) == steps * order.count("w")
    return gradients_of(module)


def plain(count: int) -> dict[str, Tensor | None]:
    """A fresh sum for every group, and the sums folded."""
    module = Mixed()
    module.calls = MICROBATCHES
    layer = Layer(0, module, HostClock(), 1)
    random = torch.Generator().manual_seed(2)
    inputs = [torch.randn(4, 6, generator=random) for _ in range(2 * MICROBATCHES)][MICROBATCHES:]
    each: dict[str, list[Tensor | None]] = {name: [] for name, _ in module.named_parameters()}
    for j, x in enumerate(inputs):
        if j % (MICROBATCHES // count) == 0:
            module.zero_grad()
        layer.forward(j, (x,), 1)
        layer.backward_input(j, (draw(j, 4, 6),), deferred=False)
        if (j + 1) % (MICROBATCHES // count) == 0:
            for name, gradient in gradients_of(module).items():
                each[name].append(None if gradient is None else gradient.clone())
    return {name: total(parts) for name, parts in each.items()}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "order",
    ["x" * 8, "bw" * 8, "b" * 8 + "w" * 8, "bbb" + "bw" * 5 + "www", "bbw" + "bw" * 6 + "w"],
)
def test_b_ahead_of_w_keeps_the_order_of_sums(order: str, count: int) -> None:
    """Norms end a group at B, and linears end it at W."""
    got = gradients(Mixed(), order, count, steps=2)
    assert_same(got, plain(count))
    assert got["never.weight"] is None
    assert got["late.weight"] is not None
