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
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from dynmo import DynmoError
from dynmo.cases.pruning.csr import Csr, pack, sddmm_, spmm, sum_tokens, unpack, wide
from dynmo.extend import PackedWeight, SplitLinear, WeightTape


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
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, bias, layer = ctx.weight, ctx.bias, ctx.layer
        if torch.is_grad_enabled():
            raise DynmoError(
                "a pruned layer's gradient cannot be differentiated again (create_graph); prune "
                "other layers"
            )
        rows, gx, gw = pack(gradients[0]), None, None
        if ctx.needs_input_grad[0]:
            flipped, order = layer.flipped
            gx = unpack(spmm(flipped, weight.detach()[0].index_select(0, order), rows), ctx.shape)
        if weight.requires_grad:
            (columns,) = ctx.saved_tensors
            tape = layer.tape if isinstance(weight, nn.Parameter) else None
            if tape is not None and tape.takes(weight):
                work = partial(_accumulate_sparse, layer.csr, weight, bias, columns, rows)
                tape.add(work, columns, rows)
                return gx, None, None, None
            gw = _zero_gradient(weight)
            sddmm_(layer.csr, rows, columns, gw[0])
        return gx, gw, sum_tokens(rows) if ctx.needs_input_grad[2] else None, None


def _zero_gradient(weight: Tensor) -> Tensor:
    return torch.zeros_like(weight, dtype=wide(weight.dtype), requires_grad=False)


@torch.no_grad()
def _accumulate_sparse(
    csr: Csr, weight: nn.Parameter, bias: nn.Parameter | None, columns: Tensor, rows: Tensor
) -> None:
    """Adds gy^T x at the kept positions to weight.grad, and the sum of gy to bias.grad."""
    if weight.grad is None:
        weight.grad = _zero_gradient(weight)
    sddmm_(csr, rows, columns, weight.grad[0])
    if bias is not None and bias.requires_grad:
        amount = sum_tokens(rows)
        bias.grad = amount if bias.grad is None else bias.grad.add_(amount)


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
        if self.csr.shape != (self.out_features, self.in_features) or not self.csr.is_valid():
            raise ValueError(
                f"{name} is sparse, but not of {self.out_features} x {self.in_features}"
            )
        return 1, len(self.col)

    def pack(self, name: str, dense: Tensor) -> Tensor:
        return dense.reshape(-1)[self.csr.positions()].reshape(1, -1)

    def unpack(self, name: str, values: Tensor) -> Tensor:
        dense = values.new_zeros(self.out_features, self.in_features)
        dense.view(-1)[self.csr.positions()] = values[0]
        return dense

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
        return self.masked_forward(input, self.values("weight"), self.kept_mask)


# -- pruning ---------------------------------------------------------------------------------------


# Exact types only: the weight of a subclass may have another meaning. The weight must be a
# parameter that is not made from others.
_PRUNABLE = (nn.Linear, SplitLinear, MaskedLinear, SparseLinear)


def linears(module: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Lists the linears of a module that can be pruned, on the meta device too."""
    for name, child in module.named_modules():
        if type(child) in _PRUNABLE and "weight" in child._parameters:
            yield name, cast(nn.Linear, child)


def weight_name(linear: str) -> str:
    return f"{linear}.weight" if linear else "weight"


def dense_size(linear: nn.Linear) -> int:
    return linear.out_features * linear.in_features


def survivors(linear: nn.Linear, master: Tensor | None = None) -> Tensor:
    """Returns the weights that are not pruned, or their float32 masters, [kept]."""
    weight = linear.weight.detach() if master is None else master
    if isinstance(linear, SparseLinear):
        return weight[0]
    return weight[linear.kept_mask] if isinstance(linear, MaskedLinear) else weight.reshape(-1)


def prune(
    linear: nn.Linear, keep: Tensor, sparse: bool, moments: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Drops survivors for good, with their gradients and moments.

    Args:
        linear: The linear. Its class and its weight are replaced.
        keep: One bool per survivor.
        sparse: Whether it takes the CSR form. A layer that has it keeps it anyway.
        moments: Tensors of the weight's shape by name. Others (step counts) pass through.

    Returns:
        The rest of the moments.
    """
    weight, unpack = linear.weight, getattr(linear, "unpack", lambda _, dense: dense)
    kept = unpack("weight", torch.ones_like(weight, dtype=torch.bool, requires_grad=False))
    if isinstance(linear, MaskedLinear):
        kept = linear.kept_mask.clone()
    kept[kept.clone()] = keep
    dense = {
        name: unpack("weight", tensor)
        for name, tensor in {"": weight.detach(), **moments}.items()
        if tensor.shape == weight.shape
    }
    if sparse or isinstance(linear, SparseLinear):
        csr = Csr.of(kept)
        form = SparseLinear.take_form(linear, {"crow": csr.crow, "col": csr.col})
    else:
        form = MaskedLinear.take_form(linear, {"kept_mask": kept})
    left = moments | {name: form.pack("weight", tensor) for name, tensor in dense.items()}
    linear.weight = nn.Parameter(left.pop(""), requires_grad=weight.requires_grad)
    return left
