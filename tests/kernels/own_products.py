"""Modules that multiply by their own parameters in their own way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Product = Callable[[Any, Tensor], Tensor]
"""Takes the module's matrices and rows [rows, in]."""


class Own(nn.Module):
    def __init__(self, run: Product, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = run
        drawn = [torch.randn(shape) / math.sqrt(shape[-1]) for shape in shapes]
        self.matrices = nn.ParameterList(drawn)

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(self.matrices, x.flatten(0, -2))
        return y.view(*x.shape[:-1], y.shape[-1])


def matmul(matrices: Any, x: Tensor) -> Tensor:
    one, other = matrices
    return (x @ one) @ other.t()


def addmm(matrices: Any, x: Tensor) -> Tensor:
    bias, weight = matrices
    return torch.addmm(bias, x, weight)


def views(matrices: Any, x: Tensor) -> Tensor:
    """Halves of one parameter, as of queries and keys."""
    (weight,) = matrices
    one, other = weight.chunk(2)
    return functional.linear(x, one) * functional.linear(x, other).sigmoid()


def experts(matrices: Any, x: Tensor) -> Tensor:
    """Rows in turn through [experts, out, in]."""
    (weight,) = matrices
    parts = [functional.linear(x[i :: len(weight)], each) for i, each in enumerate(weight)]
    return torch.cat(parts)


def grouped(matrices: Any, x: Tensor) -> Tensor:
    """The first of three groups is empty."""
    (weight,) = matrices
    ends = torch.tensor([0, len(x) // 2, len(x)], dtype=torch.int32)
    return functional.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


def twice(matrices: Any, x: Tensor) -> Tensor:
    (weight,) = matrices
    return torch.tanh(x @ weight) @ weight


def by_itself(matrices: Any, x: Tensor) -> Tensor:
    (weight,) = matrices
    return x @ weight + weight.sum()


def squared(matrices: Any, x: Tensor) -> Tensor:
    (weight,) = matrices
    return x @ (weight @ weight)


def expanded(matrices: Any, x: Tensor) -> Tensor:
    (weight,) = matrices
    return functional.linear(x, weight.expand(x.shape[-1], -1))


def checkpointed(matrices: Any, x: Tensor) -> Tensor:
    """A part within torch's checkpoint. One parameter is used outside, too."""
    y = checkpoint(twice, matrices[:1], x, use_reentrant=False)
    assert isinstance(y, Tensor)
    return y + x @ matrices[0] @ matrices[1]


def checkpointed_reentrant(matrices: Any, x: Tensor) -> Tensor:
    if not x.requires_grad:  # torch would warn
        return twice(matrices[:1], x) @ matrices[1]
    y = checkpoint(twice, matrices[:1], x, use_reentrant=True)
    assert isinstance(y, Tensor)
    return y @ matrices[1]


def slope(matrices: Any, x: Tensor) -> Tensor:
    """The slopes of an energy, by a backward of its own within F."""
    with torch.enable_grad():
        z = x if x.requires_grad else x.detach().requires_grad_()
        energy = torch.tanh(grouped(matrices, z)).square().sum()
        of = [each for each in (z, *matrices) if each.requires_grad]
        slopes = torch.autograd.grad(energy, of, create_graph=True)
    return slopes[0] + sum(each.square().sum() for each in slopes[1:])
