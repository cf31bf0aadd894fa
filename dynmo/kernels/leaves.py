"""How a layer's graph uses its leaves: the graph between inputs and outputs of one F."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import or_
from typing import Any, NamedTuple

from torch import Tensor

from dynmo.kernels.split import PLACE_OF_X, Product


class Leaves(NamedTuple):
    """The leaves of a layer's graph.

    Attributes:
        noted, on_tape, by_itself: How they are used.
        reentrant: Whether torch's old checkpoint is in the graph. It admits no `run_split`.
    """

    noted: set[Tensor]
    on_tape: set[Tensor]
    by_itself: set[Tensor]
    reentrant: bool

    @property
    def all(self) -> set[Tensor]:
        return self.noted | self.on_tape | self.by_itself

    @property
    def whole(self) -> frozenset[Tensor]:
        """Those used in several ways (`WeightTape.whole`)."""
        noted, on_tape, by_itself = self.noted, self.on_tape, self.by_itself
        return frozenset((noted & on_tape) | (noted & by_itself) | (on_tape & by_itself))

    def joined(self, other: Leaves) -> Leaves:
        """Returns the leaves of both graphs."""
        return Leaves(*map(or_, self, other))


def leaves_of(
    outputs: Iterable[Tensor], products: Sequence[Product], inputs: Iterable[Tensor] = ()
) -> Leaves:
    """Look at the graph between a layer's inputs and outputs, and at products that F has noted."""
    noted, on_tape, by_itself = set[Tensor](), set[Tensor](), set[Tensor]()
    places, reentrant = dict[Any, int](), False
    for each in products:
        places[each.node] = PLACE_OF_X[each.node.name()]
        noted.update(p for p in (each.weight, each.bias) if p is not None and p.requires_grad)
    outputs = list(outputs)
    # A layer may hand on its weight.
    by_itself.update(y for y in outputs if y.requires_grad and y.grad_fn is None)
    seen = {x.grad_fn for x in inputs}
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None and y.grad_fn not in seen]
    seen.update(nodes)
    while nodes:
        node = nodes.pop()
        reentrant = reentrant or node.name() == "CheckpointFunctionBackward"
        # The function of a module that splits has its tape as an attribute. Its first input is no
        # weight.
        has_tape, place_of_x = getattr(node, "tape", None) is not None, places.get(node)
        for place, (below, _) in enumerate(node.next_functions):
            if place_of_x not in (None, place):
                continue
            variable = getattr(below, "variable", None)
            if variable is not None:
                (on_tape if has_tape and place else by_itself).add(variable)
            elif below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    leaves = Leaves(noted, on_tape, by_itself, reentrant)
    whole = leaves.whole
    by_itself |= {x.bias for x in products if x.bias is not None and x.weight in whole}
    return leaves


def reaches(outputs: Iterable[Tensor], node: Any) -> bool:
    """Return whether the graph behind the outputs leads to the node."""
    for y in outputs:
        if y.grad_fn is not None and any(below is node for below, _ in y.grad_fn.next_functions):
            return True  # a residual stream
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        each = nodes.pop()
        if each is node:
            return True
        for below, _ in reversed(each.next_functions):
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return False
