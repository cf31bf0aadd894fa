"""A layer's graph between inputs and outputs of one F: its leaves, and its split backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from dynmo.kernels.split import (
    LOW,
    PLACE_OF_X,
    Product,
    WeightTape,
    add_to_gradient,
    as_rows,
    gradient_dtype,
    zero_gradient,
)
from dynmo.kernels.torch_private import (
    add_each,
    run_backward,
)


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


# -- B and W ---------------------------------------------------------------------------------------


class Part(NamedTuple):
    """One layer's part of a graph.

    Attributes:
        parameters: All that may be leaves of the graph.
    """

    tape: WeightTape
    parameters: Sequence[nn.Parameter]
    products: Sequence[Product]


def run_split(
    roots: tuple[GradientEdge, ...],
    gradients: tuple[Tensor, ...],
    inputs: Sequence[Tensor],
    parts: Sequence[Part],
) -> Sequence[Tensor | None]:
    """Run B. The work of the products goes to their tapes.

    Gradients of parameters that no product takes are added up.

    Args:
        roots: Where the gradients enter the graph.
        inputs: Leaves whose gradients are returned.

    Returns:
        A gradient for each input. None where the graph does not reach it.
    """
    own, waiting = list[nn.Parameter](), list[tuple[WeightTape, Sequence[Product]]]()
    for tape, parameters, products in parts:
        kept, whole = products, tape.whole
        if whole:
            kept = [x for x in products if x.weight not in whole]
        taken = {id(p) for x in kept for p in (x.weight, x.bias)} - set(map(id, whole))
        own += [p for p in parameters if p.requires_grad and id(p) not in taken]
        waiting.append((tape, kept))
    edges = [GradientEdge(x.node, 0, None) for _, products in waiting for x in products]
    if not (inputs or own or edges):
        return []
    found = run_backward(roots, gradients, (*inputs, *own, *edges))
    count, end = len(inputs), len(found)
    _add_all(own, found[count : count + len(own)])
    for tape, products in reversed(waiting):
        begin = end - len(products)
        _leave_on_tape(tape, products, found[begin:end])
        end = begin
    return found[:count]


def _add_all(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients of autograd, as it does itself."""
    sums, amounts = list[Tensor](), list[Tensor]()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        if parameter.grad is not None:
            sums.append(parameter.grad)
            amounts.append(gradient)
        elif gradient.layout is torch.strided:
            # It may share memory with another gradient.
            parameter.grad = zero_gradient(parameter).copy_(gradient)
        else:
            parameter.grad = gradient.clone()
    if sums:
        add_each(sums, amounts)


# A kernel of a CPU can add a product to a large sum itself, which saves a pass over it. With so few
# rows it rounds as if the product had been made before. With more it does not.
_FEW_ROWS, _LARGE = 128, 1 << 17


def adds_at_once(weight: Tensor, x: Tensor) -> bool:
    """Return whether W adds the product to the gradient within the kernel.

    BW must do the same, so autograd does not compute this gradient.
    """
    return (
        weight.numel() >= _LARGE
        and min(weight.shape) > 64
        and x.numel() <= _FEW_ROWS * x.shape[-1]
        and weight.is_cpu
        and weight.dtype not in LOW
    )


class _Uses(NamedTuple):
    """Factors of one weight's gradient in a microbatch, the last first, and those of biases."""

    weight: nn.Parameter
    factors: list[tuple[Tensor, Tensor]]
    biases: list[tuple[nn.Parameter, list[Tensor]]]


def _leave_on_tape(
    tape: WeightTape, products: Sequence[Product], gradients: Sequence[Tensor | None]
) -> None:
    """Leave the work of products on the tape."""
    # By id: the hash of a tensor is slow.
    uses, biases = dict[int, _Uses](), dict[int, list[Tensor]]()
    for each, gy in zip(reversed(products), reversed(gradients), strict=True):
        if gy is None:
            continue
        weight, bias, x, version, _, turned = each
        if x._version != version:
            raise RuntimeError(
                "the input of a linear was written to in place before its gradient was computed"
            )
        use = uses.get(id(weight))
        if use is None:
            use = uses[id(weight)] = _Uses(weight, [], [])
        x = x.detach()  # its graph would keep the layer's inputs until W has run
        use.factors.append((x, gy) if turned else (gy, x))
        if bias is not None and bias.requires_grad and not (tape.whole and bias in tape.whole):
            if id(bias) not in biases:
                biases[id(bias)] = several = list[Tensor]()
                use.biases.append((bias, several))
            biases[id(bias)].append(gy)
    for use in uses.values():
        if tape.taken is not None:
            tape.taken.update((use.weight, *(bias for bias, _ in use.biases)))
        tape.add(partial(_add_uses, use), *chain(*use.factors))


def _add_uses(use: _Uses) -> None:
    """Add up gradients as autograd does: those of one microbatch first, the last use before."""
    weight, total = use.weight, None
    for a, b in use.factors:
        left, right = as_rows(a).t(), as_rows(b)
        if weight.grad is not None and len(use.factors) == 1 and adds_at_once(weight, right):
            weight.grad.addmm_(left, right)
        else:
            amount = torch.mm(left, right)
            total = amount if total is None else _sum(weight, total, amount)
    if total is not None:
        add_to_gradient(weight, total)
    for bias, gradients in use.biases:
        total = as_rows(gradients[0]).sum(0)
        for gy in gradients[1:]:
            total = _sum(bias, total, as_rows(gy).sum(0))
        add_to_gradient(bias, total)


def _sum(parameter: nn.Parameter, total: Tensor, amount: Tensor) -> Tensor:
    dtype = gradient_dtype(parameter)
    return total.to(dtype).add_(amount.to(dtype))
