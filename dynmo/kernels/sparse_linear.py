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

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.errors import RunError
from dynmo.kernels.csr import Csr, pack, sddmm_, spmm, sum_tokens, unpack
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


class _Pruned(nn.Linear):
    """A linear whose weight has a meaning only inside the linear.

    Attributes:
        guard: Start of the error message for other code that reads the weight now. None allows it.
    """

    guard: str | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self.guard is not None:
            raise RunError(f"{self.guard}; let it call the linear, or leave dynamism.pruning out")
        return super().__getattr__(name)

    @property
    def own_weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self._parameters["weight"])


class SparseLinear(_Pruned):
    """nn.Linear whose `weight` holds only the kept values in row order, [1, kept].

    It is still a matrix, so that it decays as one does. `prune` makes it, never its constructor.
    """

    tape: WeightTape | None = None
    crow: Tensor
    col: Tensor
    # Derived from crow and col, so that neither travels: the CSR, and its transposed with the order
    # of the values there.
    _csr: Csr | None = None
    _flipped: tuple[Csr, Tensor] | None = None

    def forward(self, input: Tensor) -> Tensor:
        return cast(Tensor, _SparseFunction.apply(input, self.own_weight, self.bias, self))

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


class MaskedLinear(SplitLinear, _Pruned):
    """A pruned nn.Linear that stays dense: dropped weights are 0 and get no gradient."""

    kept_mask: Tensor

    def forward(self, input: Tensor) -> Tensor:
        weight = self.own_weight
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


def guarded(index: int, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` so that a layer can use a pruned weight only through its linear.

    The values of a sparse weight mean nothing without their places. A weight under a mask would get
    gradients where it is pruned. torch's fused evaluation of `nn.TransformerEncoderLayer` reads the
    weights of its linears itself. Therefore it is switched off in F of such a layer.
    """
    pruned = [(name, linear) for name, linear in linears(module) if isinstance(linear, _Pruned)]
    if not pruned:
        return run

    def run_guarded(*inputs: Tensor) -> Any:
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        for name, linear in pruned:
            linear.guard = (
                f"layer {index} uses the weight of its pruned linear {name or 'itself'!r} by itself"
            )
        try:
            return run(*inputs)
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for _, linear in pruned:
                linear.guard = None

    return run_guarded


def dense_size(linear: nn.Linear) -> int:
    return linear.out_features * linear.in_features


def dense_shape(linear: nn.Linear) -> tuple[int, int]:
    return linear.out_features, linear.in_features


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
    assert type(linear) in _PRUNABLE
    weight = linear.weight
    kept = keep.nonzero()[:, 0]
    positions = _positions(linear)[kept]
    was_sparse = isinstance(linear, SparseLinear)
    shape = weight.shape

    def change(tensor: Tensor) -> Tensor:
        if sparse or was_sparse:
            return tensor.reshape(-1)[kept if was_sparse else positions].reshape(1, -1)
        out = torch.zeros_like(tensor)
        out.view(-1)[positions] = tensor.reshape(-1)[positions]
        return out

    if sparse or was_sparse:
        csr = Csr.at(positions, (linear.out_features, linear.in_features))
        _become(linear, SparseLinear, {"crow": csr.crow, "col": csr.col})
    else:
        mask = torch.zeros(shape, dtype=torch.bool, device=weight.device)
        mask.view(-1)[positions] = True
        _become(linear, MaskedLinear, {"kept_mask": mask})
    linear.weight = nn.Parameter(change(weight.detach()), requires_grad=weight.requires_grad)
    return {name: change(t) if t.shape == shape else t for name, t in moments.items()}


def _become(linear: nn.Linear, kind: type[nn.Linear], buffers: dict[str, Tensor]) -> None:
    """Replace the class, not the module: names, bias, hooks and place stay."""
    for name in ("kept_mask", "crow", "col"):
        linear._buffers.pop(name, None)
    linear.__class__ = kind
    for name, tensor in buffers.items():
        linear.register_buffer(name, tensor)


def encodes_sparsity(module: nn.Module, name: str) -> bool:
    """Return whether a module's own buffer gives the positions of a pruned weight."""
    return (isinstance(module, SparseLinear) and name in ("crow", "col")) or (
        isinstance(module, MaskedLinear) and name == "kept_mask"
    )


def conform(module: nn.Module, buffers: dict[str, Tensor]) -> frozenset[str]:
    """Give the linears of `module` the form of a layer with these buffers.

    Their contents are not changed.

    Returns:
        The names of the weights whose shape is now their own.

    Raises:
        ValueError: A pruned weight cannot be this module's.
    """
    own: set[str] = set()
    for name, linear in list(linears(module)):
        prefix = f"{name}." if name else ""
        crow, col, mask = (buffers.get(prefix + key) for key in ("crow", "col", "kept_mask"))
        if crow is not None and col is not None:
            if crow.shape != (linear.out_features + 1,) or (
                crow.device.type != "meta" and not _fits(crow, col, linear.in_features)
            ):
                raise ValueError(
                    f"{prefix}weight is sparse, but not of {linear.out_features} x "
                    f"{linear.in_features}"
                )
            _become(linear, SparseLinear, {"crow": crow, "col": col})
            own.add(prefix + "weight")
        elif mask is not None:
            _become(linear, MaskedLinear, {"kept_mask": mask})
        elif isinstance(linear, SparseLinear | MaskedLinear):
            raise ValueError(
                f"{prefix}weight is pruned here and not there; pruned weights do not return"
            )
    return frozenset(own)


def _fits(crow: Tensor, col: Tensor, width: int) -> bool:
    ascending = int(crow[0]) == 0 and bool((crow.diff() >= 0).all()) and int(crow[-1]) == len(col)
    return ascending and (not len(col) or (int(col.min()) >= 0 and int(col.max()) < width))


def dense_weight(linear: nn.Linear, master: Tensor | None = None) -> Tensor:
    weight = linear.weight.detach() if master is None else master
    if not isinstance(linear, SparseLinear):
        return weight
    out = weight.new_zeros(dense_size(linear))
    out[linear.csr.positions()] = weight[0]
    return out.view(linear.out_features, linear.in_features)


def dense_parameters(
    module: nn.Module, masters: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """List every parameter or its master by name, pruned ones in dense form."""
    masters = masters or {}
    sparse = {
        f"{name}.weight" if name else "weight": x
        for name, x in linears(module)
        if isinstance(x, SparseLinear)
    }
    for name, parameter in module.named_parameters():
        master = masters.get(name)
        plain = parameter.detach() if master is None else master
        yield name, dense_weight(sparse[name], master) if name in sparse else plain
