"""Linears of several groups of rows at once: the experts of a mixture.

    rows     | group 0 | group 1 |  | group 3 |         groups lie behind one another, a group may be empty
    weight   [groups, out, in]                           y = x W_g^T for the rows of group g

The backward is split as that of any linear: B gives gx = gy W_g, and the tape takes W, which adds
gy^T x of each group. On CPU each group is one product, in the order of the groups. That loop is
also the reference for CUDA, where `torch.nn.functional.grouped_mm` computes all groups in one
kernel if dtype and sizes allow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels.split import LOW, WeightTape, may_split, zero_gradient

# grouped_mm wants rows that begin at multiples of so many bytes.
_ALIGNED = 16


def parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """The groups that have rows, and where these lie."""
    for group, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        if stop > start:
            yield group, slice(start, stop)


def grouped_product(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Multiplies each group of rows with its matrix.

    Args:
        x: [rows, in].
        weight: [groups, in, out].
        counts: Rows of each group. Their sum is `rows`.

    Returns:
        [rows, out].
    """
    if _fused(x, weight):
        ends = torch.tensor(list(accumulate(counts)), dtype=torch.int32, device=x.device)
        return functional.grouped_mm(x, weight, offs=ends)
    out = x.new_empty(x.shape[0], weight.shape[2])
    for group, rows in parts(counts):
        torch.mm(x[rows], weight[group], out=out[rows])
    return out


def _fused(x: Tensor, weight: Tensor) -> bool:
    sizes = (weight.shape[1] * x.element_size(), weight.shape[2] * x.element_size())
    return x.is_cuda and x.dtype == torch.bfloat16 and all(size % _ALIGNED == 0 for size in sizes)


def accumulate_groups(weight: nn.Parameter, x: Tensor, gy: Tensor, counts: Sequence[int]) -> None:
    """Adds gy^T x of each group to the weight's gradient.

    Args:
        weight: [groups, out, in].
        x: [rows, in].
        gy: [rows, out].
        counts: Rows of each group.
    """
    if weight.grad is None:
        weight.grad = zero_gradient(weight)
    for group, rows in parts(counts):
        if weight.dtype in LOW:
            weight.grad[group].add_(torch.mm(gy[rows].t(), x[rows]))
        else:
            weight.grad[group].addmm_(gy[rows].t(), x[rows])


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, counts: tuple[int, ...], tape: WeightTape | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts, ctx.tape = weight, counts, tape
        return grouped_product(x, weight.mT, counts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight, counts, tape, gy = ctx.weight, ctx.counts, ctx.tape, gradients[0].contiguous()
        gx = grouped_product(gy, weight, counts) if ctx.needs_input_grad[0] else None
        x = x.detach()
        if not ctx.needs_input_grad[1]:
            return gx, None, None, None
        if tape is None or not tape.takes(weight):
            gradient = torch.zeros_like(weight)
            for group, rows in parts(counts):
                gradient[group] = torch.mm(gy[rows].t(), x[rows])
            return gx, gradient, None, None
        tape.add(partial(accumulate_groups, weight, x, gy, counts), x, gy)
        return gx, None, None, None


class GroupedLinear(nn.Module):
    """One linear without bias per group.

    Args:
        groups: Number of groups.
        inputs: Features of a row.
        outputs: Features of its result.
        std: Standard deviation of the initial weights.
    """

    tape: WeightTape | None = None

    def __init__(self, groups: int, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs))
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """[rows, in] -> [rows, out]. counts: rows of each group."""
        tape = self.tape if may_split(self, x.device) else None
        return cast(Tensor, _GroupedFunction.apply(x, self.weight, tuple(counts), tape))
