"""The backward in two parts: input gradient now, weight gradient on a tape.

A linear's backward is two products: B is gx = gy W, for which other ranks wait, and W is
gW = gy^T x, for which no rank waits. F computes a linear with torch's own functions, and notes the
product on its layer's `WeightTape`. `run_split` then has autograd compute gx alone, and hand out
gy. W is left. Nothing else runs in Python, and all kernels are those of torch's own backward.

    F   y = x W^T           the tape notes W, x and the node of y in the graph
    B   autograd: gx, gy    each product becomes work: gW += gy^T x
    W   the work

A weight that is a part of a parameter, or masked, has a function of its own (`_LinearFunction`).
Its backward hands the work to the tape. So do embeddings and modules that opt in.

Gradients are summed in float32 even if the parameter computes in a lower precision. A microbatch's
product is then of the lower precision. Only the sum over microbatches must not lose small amounts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels.torch_private import (
    in_functorch,
    reshape_unsafe,
    saved_tensors_hooks_in_force,
)

WeightWork = Callable[[], None]

LOW = (torch.bfloat16, torch.float16)


def float32_gradients(module: nn.Module) -> None:
    """Make `.grad` of low-precision parameters float32, for autograd and for W."""
    for parameter in module.parameters():
        if parameter.dtype in LOW:
            parameter.grad_dtype = torch.float32


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in LOW else parameter.dtype


def gradient_bytes(parameter: Tensor) -> int:
    return parameter.numel() * gradient_dtype(parameter).itemsize


def zero_gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))


def add_to_gradient(parameter: nn.Parameter, amount: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = amount.to(gradient_dtype(parameter))
    else:
        parameter.grad.add_(amount)


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
    return whole.as_strided(shape, strides, whole.storage_offset() + offset)


def add_product(
    weight: nn.Parameter, left: Tensor, right: Tensor, view: View | None = None
) -> None:
    """Add left @ right to weight.grad, or to this part of it.

    The product is made by itself, as autograd makes it. Some kernels round otherwise if they add it
    to something at once, or if it is turned.
    """
    if view is None:
        add_to_gradient(weight, torch.mm(left, right))
        return
    weight.grad = zero_gradient(weight) if weight.grad is None else weight.grad.contiguous()
    part = part_of(weight.grad, view)
    if view[1] == (right.shape[1], 1):
        part.add_(torch.mm(left, right))
    else:
        part.t().add_(torch.mm(right.t(), left.t()))


# Of the inputs of autograd's nodes. The others are a weight's transpose and a bias.
PLACE_OF_X = {"AddmmBackward0": 1, "MmBackward0": 0}


class Product(NamedTuple):
    """A product with a weight in F, whose gradient can wait.

    Attributes:
        x: [..., in].
        version: How often x had been written to.
        node: The node of the product in autograd's graph.
        turned: Whether the weight is [in, out], not [out, in].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    x: Tensor
    version: int
    node: Any
    turned: bool


class WeightTape:
    """Takes the weight-gradient work of one layer.

    Attributes:
        products: Those that the layer's F has noted.
        deferred: Whether work waits in `pending`. If not, it runs at once.
        pending: Work that waits, and the tensors that it holds.
        taking: Whether the tape takes work now. The layer has it do so in its B alone. A backward
            that its F runs (`torch.autograd.grad`) gives gradients as autograd does.
        whole: Parameters that the layer also uses by itself, not through their module
            (`graph.py`). Their gradient comes from autograd, all of it in B. Otherwise the order
            of its parts, and so the bits, would depend on where W runs.
        is_reentrant: Whether B must be all of autograd's backward, as with torch's old checkpoint.
        taken: Takes the parameters whose gradients the tape takes. None takes nothing.
        hooks: The hooks on saved tensors under which products are noted. Under others, such as
            those of a checkpoint, a note would keep a tensor that the hooks let go.
        loss_gradient: The gradient with which a loss of the layer's own starts (`add_loss`). A
            tensor without dimensions on the layer's device.
    """

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.deferred, self.taking = False, True
        self.hooks: Any = None
        self.loss_gradient = torch.ones(())
        self.pending: list[tuple[WeightWork, tuple[Tensor, ...]]] = []
        self.whole: frozenset[Tensor] = frozenset()
        self.is_reentrant = False
        self.taken: set[Tensor] | None = None

    def __deepcopy__(self, _: object) -> WeightTape:
        """Return an empty tape. A copy of a layer belongs to no pipeline."""
        return WeightTape()

    def notes(self, weight: nn.Parameter) -> bool:
        """Return whether a product with the weight is noted in F.

        Autograd computes the gradient of a weight with other strides by another product.
        """
        return (
            not self.taking
            and saved_tensors_hooks_in_force() == self.hooks
            and weight.is_contiguous()
        )

    def add(self, work: WeightWork, *holds: Tensor) -> None:
        """Run the work, or keep it for later together with the tensors that it holds."""
        if self.deferred:
            self.pending.append((work, holds))
        else:
            work()

    def takes(self, *parameters: Tensor | None) -> bool:
        """Return whether the tape takes the gradients of these parameters."""
        takes = self.taking and self.whole.isdisjoint(parameters)
        if takes and self.taken is not None:
            self.taken.update(parameter for parameter in parameters if parameter is not None)
        return takes

    def take(self) -> list[tuple[WeightWork, tuple[Tensor, ...]]]:
        pending, self.pending = self.pending, []
        return pending

    def take_products(self) -> list[Product]:
        products, self.products = self.products, []
        return products


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
        matrix = part_of(weight, view)
        y = functional.linear(as_rows(x), matrix, bias)
        # It is no view, so it may be changed in place.
        return reshape_unsafe(y, (*x.shape[:-1], matrix.shape[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,), gy = ctx.saved_tensors, gradients[0]
        weight, bias, tape, view, mask = ctx.weight, ctx.bias, ctx.tape, ctx.view, ctx.mask
        gx = torch.matmul(gy, part_of(weight, view)) if ctx.needs_input_grad[0] else None
        rows = as_rows(gy)
        if not tape.takes(weight, bias):
            gw = torch.mm(rows.t(), as_rows(x))
            gw = gw if mask is None else gw * mask
            if view is not None:
                whole = torch.zeros_like(weight)
                part_of(whole, view).copy_(gw)
                gw = whole
            return gx, gw, rows.sum(0) if ctx.needs_input_grad[2] else None, None, None, None
        x = x.detach()  # its graph would keep the layer's inputs until W has run

        def accumulate() -> None:
            add_product(weight, rows.t(), as_rows(x), view)
            if mask is not None:
                weight.grad.mul_(mask)
            if bias is not None and bias.requires_grad:
                add_to_gradient(bias, rows.sum(0))

        tape.add(accumulate, x, gy)
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
    if view is None and mask is None and tape.notes(weight):
        return note(tape, functional.linear(x, weight, bias), x, weight, bias)
    return _LinearFunction.apply(x, weight, bias, tape, view, mask)


def note(
    tape: WeightTape,
    y: Tensor,
    x: Tensor,
    weight: nn.Parameter,
    bias: nn.Parameter | None,
    turned: bool = False,
) -> Tensor:
    """Note that torch has computed y from x, and return y.

    torch's own product is one of rows. What it does besides (views, a bias that is added later)
    stays with autograd, in B. Hooks on the output are to run before its gradient is taken, so they
    go to a node of their own.
    """
    node: Any = y.grad_fn
    name, given = node.name(), x
    if x.dim() != 2:
        for beside in ("AddBackward0", "UnsafeViewBackward0", "ViewBackward0"):
            if name == beside:
                node = node.next_functions[0][0]
                name = node.name()
    # `Products` may have seen the call of a linear, too.
    if name not in PLACE_OF_X or (tape.products and tape.products[-1].node is node):
        return y
    if x.dim() != 2 and not x.is_contiguous():
        # torch has made a copy, and keeps it.
        given = node._saved_mat1 if name == "AddmmBackward0" else node._saved_self
    added = bias is not None and name == "AddmmBackward0" and bias.shape == y.shape[-1:]
    product = Product(weight, bias if added else None, given, given._version, node, turned)
    tape.products.append(product)
    return y.view_as(y) if x.dim() == 2 else y


def may_split(module: nn.Module, device: torch.device) -> bool:
    """Return whether the tape may compute the module's gradients.

    They are those of its weight and bias. Autograd must compute them in three cases: they are made
    from other parameters (weight_norm, functional_call), torch.func transforms the call, or
    autocast chooses the precision of the product.
    """
    own = module._parameters
    weight, bias = own.get("weight"), own.get("bias")
    return (
        _is_parameter(weight)
        and weight.requires_grad
        and (bias is None or _is_parameter(bias))
        and ("bias" in own or not isinstance(module, nn.Linear))
        and autograd_may_split(device)
    )


def _is_parameter(tensor: Tensor | None) -> TypeGuard[nn.Parameter]:
    # torch's own instance check is slow.
    return type(tensor) is nn.Parameter or isinstance(tensor, nn.Parameter)


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
        own, tape = self._parameters, self.tape
        if tape is not None and may_split(self, input.device):
            weight, bias = cast(nn.Parameter, own["weight"]), own["bias"]
            return split_linear(input, weight, bias, tape)
        return functional.linear(input, self.weight, self.bias)

    def masked_forward(self, x: Tensor, weight: nn.Parameter, mask: Tensor) -> Tensor:
        """Computes F. Where `mask` is False, the weight is 0 and gets no gradient."""
        bias = cast("nn.Parameter | None", self.bias)
        if self.tape is not None and may_split(self, x.device):
            return split_linear(x, weight, bias, self.tape, mask=mask)
        trains = weight.requires_grad and torch.is_grad_enabled()
        return functional.linear(x, weight * mask if trains else weight, bias)


# -- a layer's own loss beside the model's, for a router that predicts or balances -----------------
#
# Its gradient starts in the layer's own B, so nothing travels between ranks. The gradient has the
# weight that the model's loss has there (its share of the step, times the loss scale). The loss
# that a run reports does not include it.


class _AddLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, tape: WeightTape | None) -> Tensor:
        ctx.tape, ctx.dtype = tape, loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        share = (
            torch.ones((), device=gradients[0].device)
            if ctx.tape is None
            else ctx.tape.loss_gradient
        )
        return gradients[0], share.to(ctx.dtype), None


def add_loss(x: Tensor, loss: Tensor, tape: WeightTape | None) -> Tensor:
    """Return `x`. Its backward also runs the backward of a loss.

    Args:
        x: The layer's output.
        loss: The mean over a microbatch, a tensor without dimensions.
        tape: The layer's tape. None means that the model's loss has the weight 1.
    """
    return cast(Tensor, _AddLoss.apply(x, loss, tape))
