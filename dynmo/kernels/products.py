"""Products with parameters that a module computes by itself, without nn.Linear.

GPT-2's Conv1D, experts in one parameter [experts, out, in], nn.MultiheadAttention and modules of
one's own call torch's functions. While such a module runs, `Products` sees these calls. It computes
the products with parameters, and with matrices that are parts of one, so that their weight gradient
can wait:

    linear(x, W)   addmm(b, x, W)   x @ W   linear(x, W[i])   grouped_mm(x, W)   embedding(ids, W)

All other calls run as they are. A matrix that was computed from a parameter gets its gradient from
autograd, in B. So do products within a torch.utils.checkpoint of the module's own: B runs them
again, but not the module, and both runs must save the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from dynmo.kernels.split import (
    LOW,
    View,
    WeightTape,
    as_rows,
    autograd_may_split,
    gradient_dtype,
    may_split,
    note,
    split_linear,
    zero_gradient,
)
from dynmo.kernels.torch_private import GROUPED_MM, FakeTensor, saved_tensors_hooks_in_force


class Products(TorchFunctionMode):
    """Leaves the gradients of the parameters in products on a tape."""

    def __init__(self, tape: WeightTape) -> None:
        super().__init__()
        self._tape = tape
        # The hooks of the running module's caller. A checkpoint within the module has its own.
        self._hooks: Any = ()

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a module's forward with the mode on."""
        hooks, before = saved_tensors_hooks_in_force(), self._hooks
        if hooks == before:
            return forward(*args, **kwargs)
        self._hooks = hooks
        try:
            with self:
                return forward(*args, **kwargs)
        finally:
            self._hooks = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given: dict[str, Any] = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None and saved_tensors_hooks_in_force() == self._hooks:
            out = rule(self._tape, *args, **given)
            return func(*args, **given) if out is None else out
        if func is functional.multi_head_attention_forward:
            # torch asks for modes at its begin. Its linears are to be seen.
            with self:
                return _attention_inside()(*args, **given)
        return func(*args, **given)


@cache
def _attention_inside() -> Callable[..., Any]:
    """Return torch's multi_head_attention_forward without its question for modes."""
    function = cast(FunctionType, functional.multi_head_attention_forward)
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    inside = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    inside.__kwdefaults__ = function.__kwdefaults__
    return inside


def _parameter(matrix: object) -> tuple[nn.Parameter, View | None] | None:
    """Return the parameter that a tensor is, or is a view of, and the view.

    None: it is neither, or has no gradient that may wait.
    """
    if not isinstance(matrix, Tensor) or not matrix.requires_grad:
        return None
    base = matrix if isinstance(matrix, nn.Parameter) else matrix._base
    if not isinstance(base, nn.Parameter) or base.dtype != matrix.dtype:
        return None
    if not base.is_contiguous() or not autograd_may_split(base.device):
        return None
    if matrix is base:
        return base, None
    if _overlaps(matrix):
        return None
    offset = cast(int, matrix.storage_offset()) - cast(int, base.storage_offset())
    return base, (tuple(matrix.shape), tuple(matrix.stride()), offset)


def _overlaps(matrix: Tensor) -> bool:
    """Return whether elements may share memory, as those of an expanded matrix do."""
    reach = 0
    for stride, size in sorted(zip(matrix.stride(), matrix.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _turned(base: nn.Parameter, view: View | None) -> View:
    shape, strides, offset = view or (tuple(base.shape), tuple(base.stride()), 0)
    return (*shape[:-2], shape[-1], shape[-2]), (*strides[:-2], strides[-1], strides[-2]), offset


def _is_transpose(base: nn.Parameter, view: View | None) -> bool:
    return base.dim() == 2 and view == _turned(base, None)


def _linear(tape: WeightTape, input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    found = _parameter(weight)
    if found is None or weight.dim() != 2 or not (bias is None or isinstance(bias, nn.Parameter)):
        return None
    base, view = found
    if _is_transpose(base, view) and tape.notes(base):
        return note(tape, functional.linear(input, weight, bias), input, base, bias, turned=True)
    return split_linear(input, base, bias, tape, view)


def _addmm(tape: WeightTape, *given: Any, **named: Any) -> Tensor | None:
    if len(given) != 3 or named:
        return None
    bias, rows, matrix = given
    if not isinstance(bias, nn.Parameter) or bias.dim() != 1:
        return None
    return _product(tape, torch.addmm, rows, matrix, bias)


def _matmul(tape: WeightTape, *given: Any, **named: Any) -> Tensor | None:
    if len(given) != 2 or named or not isinstance(given[0], Tensor) or given[0].dim() < 2:
        return None
    return _product(tape, lambda _, x, matrix: torch.matmul(x, matrix), *given, None)


def _product(
    tape: WeightTape, make: Callable[..., Tensor], x: Tensor, matrix: Any, bias: nn.Parameter | None
) -> Tensor | None:
    """Compute make(bias, x, matrix), for a matrix [in, out]."""
    found = _parameter(matrix)
    if found is None or matrix.dim() != 2:
        return None
    base, view = found
    if (view is None or _is_transpose(base, view)) and tape.notes(base):
        return note(tape, make(bias, x, matrix), x, base, bias, turned=view is None)
    return split_linear(x, base, bias, tape, _turned(base, view))


def _embedding(
    tape: WeightTape,
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    found = _parameter(weight)
    if found is None or found[1] or not plain_embedding(max_norm, scale_grad_by_freq, sparse):
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += len(weight)
    return split_embedding(input, found[0], padding_idx, tape)


class _StackedFunction(torch.autograd.Function):
    """grouped_mm of [rows, in] with [groups, in, out], a parameter or its transpose."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, ends: Tensor, turned: bool, tape: WeightTape
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.ends, ctx.turned, ctx.tape = weight, ends, turned, tape
        return _grouped_product(x, weight.mT if turned else weight, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), gy = ctx.saved_tensors, gradients[0]
        weight, ends, turned, tape = ctx.weight, ctx.ends, ctx.turned, ctx.tape
        gx = None
        if ctx.needs_input_grad[0]:
            gx = _grouped_product(gy, weight if turned else weight.mT, ends)
        if not tape.takes(weight):
            return gx, _grouped_gradient(x, gy, ends, turned), None, None, None
        x = x.detach()  # its graph would keep the layer's inputs until W has run

        def accumulate() -> None:
            gradient = _grouped_gradient(x, gy, ends, turned)
            if weight.dtype in LOW:
                weight.grad = zero_gradient(weight) if weight.grad is None else weight.grad
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)

        tape.add(accumulate, x, gy)
        return gx, None, None, None, None


def _grouped_gradient(x: Tensor, gy: Tensor, ends: Tensor, turned: bool) -> Tensor:
    left, right = (gy, x) if turned else (x, gy)
    return _grouped_product(left.t(), right, ends)


def _grouped_product(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if not isinstance(left, FakeTensor):
        return functional.grouped_mm(left, right, offs=ends)
    # On shapes torch's takes bfloat16 alone.
    groups = () if right.dim() == 3 else (len(ends),)
    return left.new_empty((*groups, left.shape[0], right.shape[-1]))


def _grouped(tape: WeightTape, *given: Any, offs: Any = None, **named: Any) -> Tensor | None:
    if len(given) != 2 or offs is None or any(value is not None for value in named.values()):
        return None
    x, matrices = given
    found = _parameter(matrices)
    if found is None:
        return None
    base, view = found
    if base.dim() != 3 or x.dim() != 2 or (view and view != _turned(base, None)):
        return None
    return _StackedFunction.apply(x, base, offs, view is not None, tape)


def stands_for_grouped_mm(func: Any) -> None:
    """Say that `func`, called on shapes, stands for the `grouped_mm` that runs on values."""

    def rule(tape: WeightTape, x: Tensor, *given: Any, **named: Any) -> Tensor | None:
        return _grouped(tape, x, *given, **named) if isinstance(x, FakeTensor) else None

    _RULES[func] = rule


# -- embeddings ------------------------------------------------------------------------------------


class _EmbeddingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: nn.Parameter, padding: int | None, tape: WeightTape
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.padding, ctx.tape = weight, padding, tape
        return functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        gy, weight, padding = gradients[0], ctx.weight, ctx.padding
        if not ctx.tape.takes(weight):
            gradient = zero_gradient(weight)
            gradient.index_add_(0, ids.reshape(-1), _rows(ids, gy, padding).to(gradient.dtype))
            return None, gradient.to(weight.dtype), None, None

        def accumulate() -> None:
            """Adds up in autograd's order: first the tokens of a microbatch, one by one.

            On other devices than the CPU the sum has no fixed order, and finding equal ids would
            wait for the device.
            """
            flat, gradient = ids.reshape(-1), weight.grad
            rows = _rows(ids, gy, padding).to(gradient_dtype(weight))
            if gradient is None:
                weight.grad = gradient = zero_gradient(weight)
            elif type(gradient) is Tensor and gradient.is_cpu:
                flat, places = flat.unique(return_inverse=True)
                rows = rows.new_zeros(len(flat), rows.shape[1]).index_add_(0, places, rows)
            gradient.index_add_(0, flat, rows)

        ctx.tape.add(accumulate, ids, gy)
        return None, None, None, None


def _rows(ids: Tensor, gy: Tensor, padding: int | None) -> Tensor:
    """Return the gradient of each id's row. That of padding is 0."""
    rows = as_rows(gy)
    if padding is None:
        return rows
    return rows.masked_fill((ids.reshape(-1) == padding).unsqueeze(1), 0)


def split_embedding(
    ids: Tensor, weight: nn.Parameter, padding: int | None, tape: WeightTape
) -> Tensor:
    """Compute functional.embedding, and leave the weight's gradient on the tape.

    Args:
        padding: The id whose row gets no gradient.
    """
    return _EmbeddingFunction.apply(ids, weight, padding, tape)


def plain_embedding(max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> bool:
    """Return whether `split_embedding` computes the embedding with these settings of torch's."""
    return max_norm is None and not scale_grad_by_freq and not sparse


class SplitEmbedding(nn.Embedding):
    """nn.Embedding whose weight gradient is all W: it has no B."""

    tape: WeightTape | None = None

    def forward(self, input: Tensor) -> Tensor:
        if (
            self.tape is None
            or not plain_embedding(self.max_norm, self.scale_grad_by_freq, self.sparse)
            or not may_split(self, input.device)
        ):
            return super().forward(input)
        weight = cast(nn.Parameter, self.weight)
        return split_embedding(input, weight, self.padding_idx, self.tape)


_RULES: dict[Any, Callable[..., Tensor | None]] = {
    functional.linear: _linear,
    functional.embedding: _embedding,
    functional.grouped_mm: _grouped,
    GROUPED_MM: _grouped,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.mm: _matmul,
}
