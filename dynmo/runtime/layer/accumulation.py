"""Gradients in one order: added up over the microbatches of a slot, and the slots folded as a fixed tree.

    slot        0     1     2     3     4     5
                 \\   /       \\   /       \\   /
                  01          23          45          two equal subtrees merge as soon as both are there
                     \\      /             |
                       0123               |
                             \\           /
                               0 .. 5                 what is left over folds from the last to the first

A replica that holds a run of slots as long as a power of two folds a subtree of it, so any number of replicas gives the same bits, and one
process with as many slots is what they are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class Tree:
    """The sum of tensors, added as the tree above; None stands for zeros. It adds into the tensors
    that it is given."""

    def __init__(self) -> None:
        self._parts: list[Tensor | None] = []
        self._count = 0

    def put(self, place: int, tensor: Tensor | None) -> None:
        """The next tensor; places that were left out are zeros."""
        assert place >= self._count, "tensors come in order"
        while self._count < place:
            self._push(None)
        self._push(tensor)

    def _push(self, tensor: Tensor | None) -> None:
        count = self._count
        while count & 1:
            tensor = _add(self._parts.pop(), tensor)
            count >>= 1
        self._parts.append(tensor)
        self._count += 1

    def total(self, count: int) -> Tensor | None:
        """Of `count` tensors; None if there was none. The tree is empty then."""
        while self._count < count:
            self._push(None)
        total = self._parts.pop()
        while self._parts:
            total = _add(self._parts.pop(), total)
        self._count = 0
        return total


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None:
        # As zeros + b, which is b but for the sign of a zero.
        return b if b is None else b.add_(0.0)
    return a.add_(0.0) if b is None else a.add_(b)


class AccumulationGroups:
    """Of one layer: sets its gradients aside where a slot ends, and says when those of the step are
    complete.

    Some parameters take their gradient in B (norms), others in W, and B may be ahead of W by
    several microbatches: each ends a slot where its own gradient of the slot's last microbatch is
    there. Which one is which shows at the first microbatch that uses it.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        microbatches: int,
        count: int,
        done: Callable[[], None] | None = None,
    ) -> None:
        """microbatches, count: of this replica. done: called when the layer's last W has run."""
        assert microbatches % count == 0, "the config checks this"
        self._last, self._each, self._count = microbatches - 1, microbatches // count, count
        self._done = done
        self._undecided = list(parameters)
        self._by_input: list[nn.Parameter] = []
        self._by_weight: list[nn.Parameter] = []
        self._trees: dict[nn.Parameter, Tree] = {}

    @property
    def watching(self) -> bool:
        """Whether W must be kept apart from B, to see which of them gives a parameter its
        gradient."""
        return self._count > 1 and any(p.requires_grad for p in self._undecided)

    def after_input(self, microbatch: int) -> None:
        """B is done, W not yet (unless nothing is `watching`)."""
        if self._count > 1:
            self._decide(self._by_input)
            self._end(self._by_input, microbatch)

    def after_weight(self, microbatch: int) -> None:
        """W is done."""
        if self._count > 1:
            self._decide(self._by_weight)
            self._end(self._by_weight, microbatch)
            if microbatch == self._last:
                for parameter, tree in self._trees.items():
                    parameter.grad = tree.total(self._count)
                self._trees.clear()
        if microbatch == self._last and self._done is not None:
            self._done()

    def _decide(self, into: list[nn.Parameter]) -> None:
        if self._undecided:
            into += [p for p in self._undecided if p.grad is not None]
            self._undecided = [p for p in self._undecided if p.grad is None]

    def _end(self, parameters: Sequence[nn.Parameter], microbatch: int) -> None:
        slot, rest = divmod(microbatch + 1, self._each)
        if rest:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                self._trees.setdefault(parameter, Tree()).put(slot - 1, parameter.grad)
                parameter.grad = None

    def clear(self) -> None:
        """Drops what a failed step left."""
        self._trees.clear()
