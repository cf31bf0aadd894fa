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

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional

from dynmo.kernels.torch_private import (
    add_each,
    in_functorch,
    reshape_unsafe,
    run_backward,
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
            (`leaves.py`). Their gradient comes from autograd, all of it in B. Otherwise the order
            of its parts, and so the bits, would depend on where W runs.
        taken: Takes the parameters whose gradients the tape takes. None takes nothing.
        hooks: The hooks on saved tensors under which products are noted. Under others, such as
            those of a checkpoint, a note would keep a tensor that the hooks let go.
        loss_share: The gradient with which a loss of the layer's own starts (`own_loss.py`). A
            tensor without dimensions on the layer's device.
    """

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.deferred, self.taking = False, True
        self.hooks: Any = None
        self.loss_share = torch.ones(())
        self.pending: list[tuple[WeightWork, tuple[Tensor, ...]]] = []
        self.whole: frozenset[Tensor] = frozenset()
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
        _wait(tape, products, found[begin:end])
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


def _wait(
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
