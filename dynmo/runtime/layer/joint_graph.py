"""Consecutive layers whose F's of one microbatch share an autograd graph.

    layers      0     1     2     3     4          a cut, because layer 2 is recomputed
    graphs     [0     1]   [2]   [3     4]
    B          one call   one   one call

Bits do not depend on cuts. A graph ends at the inputs of its first layer, which are detached.

An input that the next layer does not differentiate has no gradient, which is not a gradient of
zeros: torch's optimizers skip a parameter without one. A boolean tensor behind the gradients of a
graph's inputs then says which of them are there. The others are zeros, so that all messages of a
boundary have one shape. The first microbatch of a step decides whether the boolean tensor follows.
Without it, a gradient that is missing later counts as zeros: the parameters behind it have one.
A layer whose outputs do not depend on its input therefore begins a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dynmo.kernels.graph import Part, run_split
from dynmo.kernels.split import Product, WeightTape
from dynmo.kernels.torch_private import FunctionBase, reshape_unsafe, run_backward
from dynmo.runtime.comm.headers import is_alias, mark_alias
from dynmo.runtime.layer.buffers import Copies

Tensors = tuple[Tensor, ...]
Roots = tuple[GradientEdge | None, ...]
"""Begin of a graph for each output that gets a gradient. None for one without a graph."""


class Taped(Protocol):
    """What a graph needs of its layers."""

    tape: WeightTape
    parameters: list[nn.Parameter]


L = TypeVar("L", bound=Taped)


@dataclass
class JointGraph(Generic[L]):
    """State that a microbatch keeps from F to B.

    Attributes:
        inputs: The leaves of the graph that get a gradient.
        measured: All inputs, if their layer measures what this microbatch keeps.
        graph: Begin of the graph, or a function that builds it again.
        differentiable: Whether each output gets a gradient.
        buffers: Values that F found in the buffers that it wrote to.
        layers: They share the graph, and each has noted products.
        outputs: Those of the last layer, until `close`.
        pieces: Runs the last layer and its loss forward and backward, given the loss's gradient.
    """

    inputs: Tensors
    measured: Tensors | None
    graph: Roots | Callable[[], Tensors]
    differentiable: tuple[bool, ...]
    buffers: Copies
    layers: list[L]
    products: list[Sequence[Product]]
    outputs: Tensors = ()
    pieces: Callable[[Tensor], None] | None = None

    def close(self) -> None:
        """Ends the joining. Only the graph is kept: tensors that it has not saved may go."""
        if self.outputs:
            self.graph, self.outputs = roots_of(self.outputs, self.differentiable), ()

    def build_again(self) -> None:
        """Precedes `run`: F of a recomputed layer."""
        if callable(self.graph):
            self.graph = roots_of(self.graph(), self.differentiable)
            self.products = [self.layers[0].tape.take_products()]

    def run(self, gradients: Tensors, is_split: bool) -> Sequence[Tensor | None]:
        """Runs the backward, and returns the gradients of the inputs.

        Args:
            is_split: Whether the weights' gradients wait on the tapes.
        """
        if self.pieces is not None:
            self.pieces(gradients[0])
            return [x.grad for x in self.inputs]
        assert not callable(self.graph), "it is built again before"
        is_split = is_split and not any(layer.tape.is_reentrant for layer in self.layers)
        parts = [
            Part(layer.tape, layer.parameters, products)
            for layer, products in zip(self.layers, self.products, strict=True)
            if is_split
        ]
        self.products = []  # they would keep the inputs of linears until the whole graph has run
        return run_graph(self.graph, _present(gradients), self.inputs, parts, is_split)

    def has_gradient(self, gradients: Tensors) -> bool:
        """Returns whether some output of the graph has a gradient."""
        graph = self.graph
        return isinstance(graph, tuple) and any(
            root is not None and gradient is not None
            for root, gradient in zip(graph, _present(gradients), strict=True)
        )


def run_graph(
    roots: Roots,
    gradients: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    parts: Sequence[Part],
    is_split: bool,
) -> Sequence[Tensor | None]:
    """torch.autograd.backward without its checks, as slow as a small graph."""
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]
    if not pairs:
        return [None] * len(inputs)
    edges, given = zip(*pairs, strict=True)
    if not is_split:
        run_backward(edges, given)
        return [x.grad for x in inputs]
    found = run_split(edges, given, inputs, parts)
    # F may have run a backward of its own.
    return [
        gradient if x.grad is None else x.grad if gradient is None else x.grad.add_(gradient)
        for x, gradient in zip(inputs, found, strict=True)
    ]


def roots_of(outputs: Tensors, differentiable: Sequence[bool]) -> Roots:
    return tuple(
        [
            _edge(y) if y.requires_grad else None
            for y, counts in zip(outputs, differentiable, strict=True)
            if counts
        ]
    )


def _edge(output: Tensor) -> GradientEdge:
    """get_gradient_edge without its checks, which are slow behind ops that use caches."""
    node = output.grad_fn
    if node is None:
        return get_gradient_edge(output)  # an input, handed on
    # A node written in Python does not live by the object at hand. A C++ node behind it keeps it
    # alive.
    token: Any = output.view_as(output).grad_fn if isinstance(node, FunctionBase) else None
    return GradientEdge(node, output.output_nr, token)


def _present(gradients: Tensors) -> tuple[Tensor | None, ...]:
    """Returns the gradients, with None for those that the tensor behind them denies."""
    if not gradients or gradients[-1].dtype is not torch.bool:
        return gradients
    *values, presence = gradients
    if type(presence) is not Tensor:  # a fake tensor has no values
        return tuple(values)
    return tuple(
        gradient if is_there else None
        for gradient, is_there in zip(values, presence.tolist(), strict=True)
    )


def filled(inputs: Sequence[Tensor], found: Sequence[Tensor | None], marks: bool) -> Tensors:
    """Returns gradients of the inputs, zeros where none was found.

    `marks` says whether the boolean tensor follows.
    """
    gradients = tuple(
        [
            torch.zeros_like(x) if gradient is None else gradient
            for x, gradient in zip(inputs, found, strict=True)
        ]
    )
    return (*gradients, torch.tensor([each is not None for each in found])) if marks else gradients


def without_hooks(inputs: Tensors) -> Tensors:
    return tuple([requiring(x, x.requires_grad) for x in inputs])


def with_leaf(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tensor behind a leaf that gets its gradient, and the leaf.

    The leaf has the shape and one element of memory. An accumulating node holds its leaf: with the
    tensor as the leaf, its memory would live until B, whether the graph has saved it or not.
    """
    if not x.requires_grad:
        return x, x
    leaf = x.new_empty(()).expand(x.shape).requires_grad_()
    behind = reshape_unsafe(leaf, x.shape)  # no view of the leaf: it may be written to
    behind.data = x.detach()
    if is_alias(x):
        mark_alias(behind)
    return behind, leaf


def requiring(y: Tensor, requires: bool = True) -> Tensor:
    """Returns an output without its graph."""
    detached = y.detach().requires_grad_(requires)
    if is_alias(y):
        mark_alias(detached)
    return detached
