"""The backward in two parts: input gradient now, weight gradient on a tape.

A linear's backward is two products: B is gx = gy W, for which other ranks wait, and W is
gW = gy^T x, for which no rank waits. `SplitLinear` runs the first and hands the second to its
layer's `WeightTape`. The tape runs it at once (BW) or keeps it for later (W). Both ways use the
same kernel, in microbatch order, so they leave the same bits.

Gradients are summed in float32 even if the parameter computes in a lower precision. A microbatch's
product is then of the lower precision (on CUDA of float32). Only the sum over microbatches must not
lose small amounts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels.torch_private import in_functorch, reshape_unsafe

WeightWork = Callable[[], None]

LOW = (torch.bfloat16, torch.float16)


def float32_gradients(module: nn.Module) -> None:
    """Make `.grad` of low-precision parameters float32, for autograd and for W."""
    for parameter in module.parameters():
        if parameter.dtype in LOW:
            parameter.grad_dtype = torch.float32


def gradient_bytes(parameter: Tensor) -> int:
    return parameter.numel() * (4 if parameter.dtype in LOW else parameter.element_size())


def zero_gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(
        parameter, dtype=torch.float32 if parameter.dtype in LOW else parameter.dtype
    )


def add_to_gradient(parameter: nn.Parameter, amount: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = amount.to(torch.float32) if parameter.dtype in LOW else amount
    else:
        parameter.grad.add_(amount)


# A CPU rounds a narrow product otherwise if it adds it to something at once. A product of its own,
# as autograd makes it, keeps the bits of plain torch (adapters), and takes little memory.
_NARROW = 64


View = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a matrix that is part of a parameter, or its transpose.

The offset counts elements from the parameter's first one. The parameter is contiguous.
"""


def part_of(whole: Tensor, view: View | None) -> Tensor:
    """Return the part of a contiguous tensor. The tensor may start anywhere in its storage."""
    if view is None:
        return whole
    assert whole.is_contiguous()
    shape, strides, offset = view
    return whole.as_strided(shape, strides, cast(int, whole.storage_offset()) + offset)


def add_product(
    weight: nn.Parameter, left: Tensor, right: Tensor, view: View | None = None
) -> None:
    """Add left @ right to weight.grad, or to this part of it."""
    if view is not None:
        weight.grad = zero_gradient(weight) if weight.grad is None else weight.grad.contiguous()
    if weight.grad is None:
        weight.grad = _product(weight, left, right)
        return
    sum_so_far = part_of(weight.grad, view)
    if sum_so_far.stride(0) < sum_so_far.stride(1):  # a transpose
        sum_so_far, left, right = sum_so_far.t(), right.t(), left.t()
    narrow = left.is_cpu and min(left.shape[0], right.shape[1]) <= _NARROW
    if weight.dtype in LOW or narrow:
        sum_so_far.add_(_product(weight, left, right))
    else:
        sum_so_far.addmm_(left, right)


def _product(weight: nn.Parameter, left: Tensor, right: Tensor) -> Tensor:
    if weight.dtype not in LOW:
        return torch.mm(left, right)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left, right).to(torch.float32)


def add_rows(bias: nn.Parameter, rows: Tensor) -> None:
    """Add the sum of the rows to bias.grad."""
    add_to_gradient(bias, rows.sum(0, dtype=torch.float32) if bias.dtype in LOW else rows.sum(0))


class WeightTape:
    """Takes the weight-gradient work of one layer while its backward runs.

    Attributes:
        deferred: Whether work waits in `pending`. If not, `run` is called for it at once.
        run: Runs work. The layer sets it, to time the work.
        pending: Work that waits, and the tensors that it holds.
        taking: Whether the tape takes work now. The layer has it do so in its B alone. A backward
            that its F runs (`torch.autograd.grad`) gives gradients as autograd does.
        whole: Parameters that the layer also uses by itself, not through their module
            (`used_leaves`). Their gradient comes from autograd, all of it in B. Otherwise the order
            of its parts, and so the bits, would depend on where W runs.
        taken: Takes the parameters whose gradients the tape takes. None takes nothing.
        loss_share: The gradient with which a loss of the layer's own starts (`own_loss.py`). A
            tensor without dimensions on the layer's device.
    """

    __slots__ = ("deferred", "loss_share", "pending", "run", "taken", "taking", "whole")

    def __init__(self) -> None:
        self.deferred, self.taking = False, True
        self.loss_share = torch.ones(())
        self.pending: list[tuple[WeightWork, tuple[Tensor, ...]]] = []
        self.run: Callable[[WeightWork], None] = lambda work: work()
        self.whole: frozenset[Tensor] = frozenset()
        self.taken: set[Tensor] | None = None

    def __deepcopy__(self, _: object) -> WeightTape:
        """Return an empty tape. A copy of a layer belongs to no pipeline."""
        return WeightTape()

    def add(self, work: WeightWork, *holds: Tensor) -> None:
        """Run the work, or keep it for later together with the tensors that it holds."""
        if self.deferred:
            self.pending.append((work, holds))
        else:
            self.run(work)

    def takes(self, *parameters: Tensor | None) -> bool:
        """Return whether the tape takes the gradients of these parameters."""
        takes = self.taking and self.whole.isdisjoint(parameters)
        if takes and self.taken is not None:
            self.taken.update(parameter for parameter in parameters if parameter is not None)
        return takes

    def take(self) -> list[tuple[WeightWork, tuple[Tensor, ...]]]:
        pending, self.pending = self.pending, []
        return pending


class Split(Protocol):
    """A module that leaves its weight gradient on a tape, if it has one.

    The class of a user's module opts in with the attribute `tape = None`.
    """

    tape: WeightTape | None


def splits(module: nn.Module) -> TypeGuard[Split]:
    """Return whether the module has opted in. Another `tape` is the module's own."""
    return getattr(type(module), "tape", module) is None and isinstance(
        vars(module).get("tape"), WeightTape | None
    )


def as_rows(x: Tensor) -> Tensor:
    """Reshape [..., n] to [rows, n], for any n. `reshape(-1, 0)` would be ambiguous."""
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 2 else x.unsqueeze(0)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute functional.linear. The result is no view, so it may be changed in place."""
    if x.dim() == 2:
        return functional.linear(x, weight, bias)
    y = functional.linear(as_rows(x), weight, bias)
    return reshape_unsafe(y, (*x.shape[:-1], weight.shape[0]))


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        tape: WeightTape,
        view: View | None,
        mask: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.tape, ctx.view, ctx.mask = weight, bias, tape, view, mask
        return product(x, part_of(weight, view), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), gy = ctx.saved_tensors, gradients[0]
        weight, bias, tape, view, mask = ctx.weight, ctx.bias, ctx.tape, ctx.view, ctx.mask
        gx = torch.matmul(gy, part_of(weight, view)) if ctx.needs_input_grad[0] else None
        if not tape.takes(weight, bias):
            rows = as_rows(gy)
            gw = torch.mm(rows.t(), as_rows(x))
            gw = gw if mask is None else gw * mask
            if view is not None:
                whole = torch.zeros_like(weight)
                part_of(whole, view).copy_(gw)
                gw = whole
            return gx, gw, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None, None
        x = x.detach()  # its graph would keep the layer's inputs until W has run
        tape.add(partial(accumulate_linear, weight, bias, x, gy, view, mask), x, gy)
        return gx, None, None, None, None, None


def split_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    tape: WeightTape,
    view: View | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute functional.linear, and leave the weight's gradient on the tape.

    Args:
        x: [..., in].
        weight: [out, in], or a parameter of which `view` is such a matrix.
        bias: [out].
        mask: Bools [out, in]. Where it is False, the weight gets no gradient. Not with a view.
    """
    return cast(Tensor, _LinearFunction.apply(x, weight, bias, tape, view, mask))


def accumulate_linear(
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    x: Tensor,
    gy: Tensor,
    view: View | None = None,
    mask: Tensor | None = None,
) -> None:
    """Add gy^T x to weight.grad, or to this part of it, and the sum of gy to bias.grad."""
    rows = as_rows(gy)
    add_product(weight, rows.t(), as_rows(x), view)
    if mask is not None:
        cast(Tensor, weight.grad).mul_(mask)
    if bias is not None and bias.requires_grad:
        add_rows(bias, rows)


def may_split(module: nn.Module, device: torch.device) -> bool:
    """Return whether the tape may compute the module's gradients.

    They are those of its weight and bias. Autograd must compute them in three cases: they are made
    from other parameters (weight_norm, functional_call), torch.func transforms the call, or
    autocast chooses the precision of the product.
    """
    if not autograd_may_split(device):
        return False
    own = module._parameters
    bias = own.get("bias")
    if not isinstance(own.get("weight"), nn.Parameter) or not (
        bias is None or isinstance(bias, nn.Parameter)
    ):
        return False
    return "bias" in own or not isinstance(module, nn.Linear)


def autograd_may_split(device: torch.device) -> bool:
    """Return `may_split` for a module whose parameters are checked elsewhere."""
    return (
        torch.is_grad_enabled()
        and not torch.is_autocast_enabled(device.type)
        and not in_functorch()
    )


class SplitLinear(nn.Linear):
    """nn.Linear whose weight gradient can be deferred."""

    tape: WeightTape | None = None

    def forward(self, input: Tensor) -> Tensor:
        return self.split_forward(input, cast(nn.Parameter, self.weight))

    def split_forward(self, x: Tensor, weight: nn.Parameter, mask: Tensor | None = None) -> Tensor:
        """Computes F. Where `mask` is False, the weight is 0 and gets no gradient."""
        bias = cast("nn.Parameter | None", self.bias)
        if self.tape is not None and weight.requires_grad and may_split(self, x.device):
            return split_linear(x, weight, bias, self.tape, mask=mask)
        trains = weight.requires_grad and torch.is_grad_enabled()
        masked = weight if mask is None or not trains else weight * mask
        return functional.linear(x, masked, bias)


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
        ctx.tape.add(lambda: accumulate_embedding(weight, ids, gy, padding), ids, gy)
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
    return cast(Tensor, _EmbeddingFunction.apply(ids, weight, padding, tape))


def used_leaves(outputs: Iterable[Tensor]) -> tuple[set[Tensor], set[Tensor]]:
    """Find the leaves of a layer's graph: those in modules that split, and those outside."""
    by_module, by_itself = set[Tensor](), set[Tensor]()
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        # The function of a module that splits has its tape as an attribute. Its first input is no
        # weight.
        on_tape = getattr(node, "tape", None) is not None
        for place, (below, _) in enumerate(node.next_functions):
            variable = getattr(below, "variable", None)
            if variable is not None:
                (by_module if on_tape and place else by_itself).add(variable)
            elif below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
    return by_module, by_itself


def accumulate_embedding(
    weight: nn.Parameter, ids: Tensor, gy: Tensor, padding: int | None = None
) -> None:
    """Add gy to weight.grad[ids], but for the id of padding.

    As in autograd, the tokens of a microbatch are summed first, in their order. On other devices
    than the CPU the sum has no fixed order, and finding equal ids would wait for the device.
    """
    with torch.no_grad():
        flat, is_first = ids.reshape(-1), weight.grad is None
        if is_first:
            weight.grad = zero_gradient(weight)
        gradient = cast(Tensor, weight.grad)
        rows = _rows(ids, gy, padding).to(gradient.dtype)
        if not is_first and type(gradient) is Tensor and gradient.is_cpu:
            flat, places = flat.unique(return_inverse=True)
            rows = rows.new_zeros(len(flat), rows.shape[1]).index_add_(0, places, rows)
        gradient.index_add_(0, flat, rows)


def plain_embedding(max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> bool:
    """Return whether `split_embedding` computes the embedding with these settings of torch's."""
    return max_norm is None and not scale_grad_by_freq and not sparse


class SplitEmbedding(nn.Embedding):
    """nn.Embedding whose weight gradient is all W: it has no B."""

    tape: WeightTape | None = None

    def forward(self, input: Tensor) -> Tensor:
        weight = cast(nn.Parameter, self.weight)
        if (
            self.tape is None
            or not weight.requires_grad
            or not plain_embedding(self.max_norm, self.scale_grad_by_freq, self.sparse)
            or not may_split(self, input.device)
        ):
            return super().forward(input)
        return split_embedding(input, weight, self.padding_idx, self.tape)
