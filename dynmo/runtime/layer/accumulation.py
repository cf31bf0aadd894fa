"""Gradients in one order: a fixed tree of accumulation groups of microbatches.

Microbatches add up in a group, and the groups fold as the tree.

    group       0     1     2     3     4     5
                 \\   /       \\   /       \\   /
                  01          23          45      two equal subtrees merge as soon as both exist
                     \\      /             |
                       0123               |
                             \\           /
                               0 .. 5             the rest folds from the last to the first

A replica that holds a run of groups as long as a power of two folds a subtree. So any number of
replicas gives the same bits. The reference is one rank with as many groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn


class Tree:
    """The sum of tensors, added as the tree above. None stands for zeros.

    It adds into the tensors that it is given.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor | None] = []
        self._count = 0

    def put(self, place: int, tensor: Tensor | None) -> None:
        """Adds the tensor of a place, which only grows. Places left out are zeros."""
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
        """Returns the sum of `count` tensors, or None if there was none. Empties the tree."""
        while self._count < count:
            self._push(None)
        total = self._parts.pop()
        while self._parts:
            total = _add(self._parts.pop(), total)
        self._count = 0
        return total


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None:
        # Equal to zeros + b, which is b but for the sign of a zero.
        return b if b is None else b.add_(0.0)
    return a.add_(0.0) if b is None else a.add_(b)


def tree_sum(tensors: Iterable[tuple[int, Tensor | None]], count: int) -> Tensor | None:
    """Returns the sum of `count` tensors, given in order with their places. Others are 0."""
    tree = Tree()
    for place, tensor in tensors:
        tree.put(place, tensor)
    return tree.total(count)


class AccumulationGroups:
    """Sets a layer's gradients aside at the end of an accumulation group.

    Some parameters take their gradient in B (norms), others in W. B may be ahead of W by several
    microbatches. A parameter's group therefore ends when its own gradient of the group's last
    microbatch is there. The first microbatch of a step that uses a parameter shows whether B or W
    gives it.

    Args:
        microbatches: Number of microbatches of this replica.
        count: Number of accumulation groups of this replica. It divides `microbatches`.
        done: Called when the layer's last W has run.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        microbatches: int,
        count: int,
        done: Callable[[], None] | None = None,
    ) -> None:
        assert microbatches % count == 0, "the config checks this"
        self._last, self._each, self._count = microbatches - 1, microbatches // count, count
        self._done = done
        self._parameters = list(parameters)
        self._trees: dict[nn.Parameter, Tree] = {}
        self.begin()

    def begin(self) -> None:
        """Begins a step. A layer may compute otherwise than before, since others froze, say."""
        self._undecided = list(self._parameters)
        self._by_input: list[nn.Parameter] = []
        self._by_weight: list[nn.Parameter] = []

    @property
    def watching(self) -> bool:
        """Whether W must be apart from B, to see which gives a parameter its gradient."""
        return self._count > 1 and any(p.requires_grad for p in self._undecided)

    def ends_at(self, microbatch: int) -> bool:
        """Returns whether the layer's gradients are set aside or awaited after this microbatch."""
        is_group = self._count > 1 and (microbatch + 1) % self._each == 0
        return is_group or (microbatch == self._last and self._done is not None)

    def after_input(self, microbatch: int) -> None:
        """Notes that B is done. W is not yet done (unless nothing is `watching`)."""
        self._after(self._by_input, microbatch)

    def after_weight(self, microbatch: int) -> None:
        self._after(self._by_weight, microbatch)
        if microbatch == self._last:
            for parameter, tree in self._trees.items():
                parameter.grad = tree.total(self._count)
            self._trees.clear()
            if self._done is not None:
                self._done()

    def _after(self, parameters: list[nn.Parameter], microbatch: int) -> None:
        """Sets the gradients of these parameters aside, and of undecided ones that have one."""
        if self._count == 1:
            return
        if self._undecided:
            parameters += [p for p in self._undecided if p.grad is not None]
            self._undecided = [p for p in self._undecided if p.grad is None]
        done, rest = divmod(microbatch + 1, self._each)
        if rest:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                self._trees.setdefault(parameter, Tree()).put(done - 1, parameter.grad)
                parameter.grad = None

    def clear(self) -> None:
        """Drops the gradients that a failed step left."""
        self._trees.clear()
