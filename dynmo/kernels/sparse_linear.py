"""A pruned linear layer that does less work.

Its weight is CSR, and the kept values are the parameter. Every product goes through the kept
weights once and works on whole vectors of tokens (csr.py):

    F   y^T  = A   x^T         SpMM
    B   gx^T = A^T gy^T        SpMM with the transposed CSR
    W   gA   = gy^T x          SDDMM: one dot product over the tokens for each kept weight

Below the sparsity at which CSR pays, a layer stays dense under a mask (`MaskedLinear`). Its numbers
are the same to within rounding, and nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.errors import RunError
from dynmo.kernels.csr import Csr, pack, sddmm_, spmm, sum_tokens, unpack
from dynmo.kernels.packed_weight import PackedWeight, unpacked
from dynmo.kernels.split import (
    SplitLinear,
    WeightTape,
    accumulate_linear,
    add_to_gradient,
    may_split,
    product,
    zero_gradient,
)


class _SparseFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: SparseLinear
    ) -> Tensor:
        columns = pack(x)
        if weight.requires_grad:
            ctx.save_for_backward(columns)
        ctx.weight, ctx.bias, ctx.layer, ctx.shape = weight, bias, layer, x.shape
        y = unpack(spmm(layer.csr, weight[0], columns), (*x.shape[:-1], layer.out_features))
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        weight, bias, layer, gy = ctx.weight, ctx.bias, ctx.layer, gradients[0]
        if torch.is_grad_enabled():
            raise RunError(
                "a pruned layer's gradient cannot be differentiated again (create_graph); prune "
                "other layers"
            )
        rows = pack(gy)
        gx = None
        if ctx.needs_input_grad[0]:
            flipped, order = layer.flipped
            gx = unpack(spmm(flipped, weight.detach()[0].index_select(0, order), rows), ctx.shape)
        if not weight.requires_grad:
            trains = bias is not None and bias.requires_grad
            return gx, None, sum_tokens(rows) if trains else None, None
        (columns,) = ctx.saved_tensors
        csr, tape = layer.csr, layer.tape
        if tape is None or not isinstance(weight, nn.Parameter) or not tape.takes(weight):
            gradient = zero_gradient(weight)
            sddmm_(csr, rows, columns, gradient[0])
            return gx, gradient, None if bias is None else sum_tokens(rows), None
        tape.add(lambda: accumulate_sparse(csr, weight, bias, columns, rows), columns, rows)
        return gx, None, None, None


def accumulate_sparse(
    csr: Csr, weight: nn.Parameter, bias: nn.Parameter | None, columns: Tensor, rows: Tensor
) -> None:
    """Add gy^T x at the kept positions to weight.grad, and the sum of gy to bias.grad."""
    with torch.no_grad():
        if weight.grad is None:
            weight.grad = zero_gradient(weight)
        sddmm_(csr, rows, columns, weight.grad[0])
        if bias is not None and bias.requires_grad:
            add_to_gradient(bias, sum_tokens(rows))


class SparseLinear(PackedWeight, nn.Linear):
    """nn.Linear whose `weight` holds only the kept values in row order, [1, kept].

    It is still a matrix, so that it decays as one does. `prune` makes it, never its constructor.
    """

    plain: ClassVar[type[nn.Module]] = nn.Linear
    form: ClassVar[tuple[str, ...]] = ("crow", "col")
    tape: WeightTape | None = None
    crow: Tensor
    col: Tensor
    # Derived from crow and col, so that neither travels: the CSR, and its transposed with the order
    # of the values there.
    _csr: Csr | None = None
    _flipped: tuple[Csr, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, _SparseFunction.apply(input, self.values("weight"), self.bias, self))

    def packed_shape(self, name: str) -> tuple[int, ...]:
        if self.crow.shape != (self.out_features + 1,) or not self.csr.is_valid():
            raise ValueError(
                f"{name} is sparse, but not of {self.out_features} x {self.in_features}"
            )
        return 1, len(self.col)

    def pack(self, name: str, dense: Tensor) -> Tensor:
        return dense.reshape(-1)[self.csr.positions()].reshape(1, -1)

    def unpack(self, name: str, values: Tensor) -> Tensor:
        dense = values.new_zeros(self.out_features * self.in_features)
        dense[self.csr.positions()] = values[0]
        return dense.view(self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, kept={self.weight.numel()}"

    @property
    def csr(self) -> Csr:
        # Buffers are replaced as a layer moves or is restored. A CSR of old buffers would be wrong.
        if self._csr is None or self._csr.crow is not self.crow or self._csr.col is not self.col:
            self._csr, self._flipped = Csr(self.crow, self.col, self.in_features), None
        return self._csr

    @property
    def flipped(self) -> tuple[Csr, Tensor]:
        csr = self.csr
        if self._flipped is None:
            self._flipped = csr.transposed()
        return self._flipped

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self._csr = self._flipped = None
        return super()._apply(fn, recurse)


class _MaskedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None, layer: MaskedLinear
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.mask, ctx.tape = weight, bias, layer.kept_mask, layer.tape
        return product(x, weight, bias)

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        gy, weight, bias, mask = gradients[0], ctx.weight, ctx.bias, ctx.mask
        gx = torch.matmul(gy, weight) if ctx.needs_input_grad[0] else None
        if ctx.tape is None or not ctx.tape.takes(weight):
            x2, gy2 = x.reshape(-1, x.shape[-1]), gy.reshape(-1, gy.shape[-1])
            return gx, torch.mm(gy2.t(), x2) * mask, None if bias is None else gy2.sum(0), None
        x = x.detach()
        ctx.tape.add(lambda: _accumulate_masked(weight, bias, mask, x, gy), x, gy)
        return gx, None, None, None


def _accumulate_masked(
    weight: nn.Parameter, bias: nn.Parameter | None, mask: Tensor, x: Tensor, gy: Tensor
) -> None:
    accumulate_linear(weight, bias, x, gy)
    assert weight.grad is not None
    weight.grad.mul_(mask)


class MaskedLinear(PackedWeight, SplitLinear):
    """A pruned nn.Linear that stays dense: dropped weights are 0 and get no gradient."""

    plain: ClassVar[type[nn.Module]] = nn.Linear
    form: ClassVar[tuple[str, ...]] = ("kept_mask",)
    kept_mask: Tensor

    def packed_shape(self, name: str) -> tuple[int, ...]:
        return self.out_features, self.in_features

    def pack(self, name: str, dense: Tensor) -> Tensor:
        return dense.masked_fill(~self.kept_mask, 0)

    def unpack(self, name: str, values: Tensor) -> Tensor:
        return values

    def forward(self, input: Tensor) -> Tensor:
        weight = self.values("weight")
        if not weight.requires_grad or not torch.is_grad_enabled():
            return functional.linear(input, weight, self.bias)
        if not may_split(self, input.device):
            return functional.linear(input, weight * self.kept_mask, self.bias)
        return cast(Tensor, _MaskedFunction.apply(input, weight, self.bias, self))


# -- pruning ---------------------------------------------------------------------------------------


# Exact types only: the weight of a subclass may have another meaning. The weight must be a
# parameter that is not made from others.
_PRUNABLE = (nn.Linear, SplitLinear, MaskedLinear, SparseLinear)


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """List the linears of a module that can be pruned, on the meta device too."""
    for name, child in module.named_modules():
        if type(child) in _PRUNABLE and "weight" in child._parameters:
            yield name, cast(nn.Linear, child)


def dense_size(linear: nn.Linear) -> int:
    return linear.out_features * linear.in_features


def survivors(linear: nn.Linear, master: Tensor | None = None) -> Tensor:
    """Return the weights that are not pruned, or their float32 masters, [kept]."""
    weight = linear.weight.detach() if master is None else master
    if isinstance(linear, SparseLinear):
        return weight[0]
    return weight[linear.kept_mask] if isinstance(linear, MaskedLinear) else weight.reshape(-1)


def _positions(linear: nn.Linear) -> Tensor:
    if isinstance(linear, SparseLinear):
        return linear.csr.positions()
    if isinstance(linear, MaskedLinear):
        return linear.kept_mask.reshape(-1).nonzero()[:, 0]
    return torch.arange(dense_size(linear), device=linear.weight.device)


def prune(
    linear: nn.Linear, keep: Tensor, sparse: bool, moments: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Drop survivors for good, with their gradients and moments.

    Args:
        linear: The linear. Its class and its weight are replaced.
        keep: One bool per survivor.
        sparse: Whether it takes the CSR form. A layer that has it keeps it anyway.
        moments: Tensors of the weight's shape by name. Others (step counts) pass through.

    Returns:
        The rest of the moments.
    """
    weight = linear.weight
    # Gradients go. Tensors of another shape are step counts and the like.
    dense = {
        name: unpacked(linear, "weight", t)
        for name, t in {"": weight.detach(), **moments}.items()
        if t.shape == weight.shape
    }
    positions = _positions(linear)[keep]
    if sparse or isinstance(linear, SparseLinear):
        csr = Csr.at(positions, (linear.out_features, linear.in_features))
        SparseLinear.take_form(linear, {"crow": csr.crow, "col": csr.col})
    else:
        mask = torch.zeros(dense_size(linear), dtype=torch.bool, device=weight.device)
        mask[positions] = True
        MaskedLinear.take_form(linear, {"kept_mask": mask.view(weight.shape)})
    pruned = cast(PackedWeight, linear)
    left = moments | {name: pruned.pack("weight", t) for name, t in dense.items()}
    linear.weight = nn.Parameter(left.pop(""), requires_grad=weight.requires_grad)
    return left
