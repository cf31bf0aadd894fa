"""Linears of several groups of rows at once: the experts of a mixture.

    rows     | block 0 | block 1 |  | block 3 |      blocks lie behind one another, one may be empty
    weight      W_0       W_1          W_3            y = x W^T for the rows of a block

A rank may hold only some of the groups (`hold`), and compute rows of several replicas
(`take_rows`). Each source then has its own gradient, so that the gradients can be added up in the
order in which replicas without shared experts add them.

On CPU each block is one product, in order. That loop is also the reference for CUDA. There
`torch.nn.functional.grouped_mm` computes the blocks of a source in one kernel if dtype and sizes
allow it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.kernels.split import (
    WeightTape,
    add_product,
    autograd_may_split,
    float32_gradients,
    zero_gradient,
)

# grouped_mm needs rows that begin at multiples of so many bytes.
_ALIGNED = 16
_CACHE_LINE = 64


def parts(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """List the blocks that have rows, and the positions of these."""
    for block, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        if stop > start:
            yield block, slice(start, stop)


def grouped_product(
    x: Tensor, weights: Sequence[Tensor], counts: Sequence[int], per_kernel: int
) -> Tensor:
    out = x.new_empty(x.shape[0], weights[0].shape[1])
    if _fused(x, weights[0]):
        start = 0
        for first in range(0, len(weights), per_kernel):
            some = slice(first, first + per_kernel)
            ends = torch.tensor(list(accumulate(counts[some])), dtype=torch.int32, device=x.device)
            rows = slice(start, start + sum(counts[some]))
            out[rows] = functional.grouped_mm(x[rows], stacked(weights[some]), offs=ends)
            start = rows.stop
        return out
    for block, rows in parts(counts):
        if _is_aligned(out[rows]):
            torch.mm(aligned(x[rows]), weights[block], out=out[rows])
        else:
            out[rows] = torch.mm(aligned(x[rows]), weights[block])
    return out


def _is_aligned(rows: Tensor) -> bool:
    return rows.storage_offset() * rows.element_size() % _CACHE_LINE == 0


def aligned(rows: Tensor) -> Tensor:
    """Return the rows in memory that begins at a cache line.

    The bits of a product depend on where its factors begin (MKL). The place of a block in a batch
    depends on the placement of the experts.
    """
    return rows if _is_aligned(rows) else rows.clone()


def stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Return [matrices, ...], as a view if they lie behind one another."""
    first = matrices[0]
    step = first.numel()
    storage = first.untyped_storage().data_ptr()
    if all(
        each.untyped_storage().data_ptr() == storage
        and each.storage_offset() == first.storage_offset() + place * step
        for place, each in enumerate(matrices)
    ):
        return first.as_strided((len(matrices), *first.shape), (step, *first.stride()))
    return torch.stack(tuple(matrices))


def _fused(x: Tensor, weight: Tensor) -> bool:
    sizes = (weight.shape[0] * x.element_size(), weight.shape[1] * x.element_size())
    return x.is_cuda and x.dtype == torch.bfloat16 and all(size % _ALIGNED == 0 for size in sizes)


def accumulate_groups(
    weights: Sequence[nn.Parameter], x: Tensor, gy: Tensor, counts: Sequence[int]
) -> None:
    """Add gy^T x of each block to its weight's gradient, zeros for an empty block."""
    for weight in weights:
        if weight.grad is None:
            weight.grad = zero_gradient(weight)
    for block, rows in parts(counts):
        add_product(weights[block], aligned(gy[rows]).t(), aligned(x[rows]))


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        counts: tuple[int, ...],
        per_kernel: int,
        tape: WeightTape | None,
        *weights: nn.Parameter,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weights, ctx.counts, ctx.per_kernel, ctx.tape = weights, counts, per_kernel, tape
        return grouped_product(x, [weight.mT for weight in weights], counts, per_kernel)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weights, counts, tape, gy = ctx.weights, ctx.counts, ctx.tape, gradients[0].contiguous()
        gx = None
        if ctx.needs_input_grad[0]:
            gx = grouped_product(gy, weights, counts, ctx.per_kernel)
        x = x.detach()
        nothing = [None] * (3 + len(weights))
        if not any(ctx.needs_input_grad[1:]):
            return gx, *nothing
        if tape is None or not tape.takes(*weights):
            own = [torch.zeros_like(weight) for weight in weights]
            for block, rows in parts(counts):
                own[block] = torch.mm(aligned(gy[rows]).t(), aligned(x[rows]))
            return gx, None, None, None, *own
        tape.add(partial(accumulate_groups, weights, x, gy, counts), x, gy)
        return gx, *nothing


class GroupedLinear(nn.Module):
    """One linear without bias per group. `std` is that of the initial weights.

    Attributes:
        per_token: Groups that compute a token.
    """

    tape: WeightTape | None = None
    per_token = 1

    def __init__(self, groups: int, inputs: int, outputs: int, std: float) -> None:
        super().__init__()
        self.groups = groups
        for group in range(groups):
            weight = nn.Parameter(torch.empty(outputs, inputs))
            nn.init.normal_(weight, std=std)
            self.register_parameter(str(group), weight)
        # Source and group of each block. None: one block per group, of this rank's own rows.
        self._blocks: tuple[tuple[int, int], ...] | None = None
        self._own_source = 0
        self._copies: dict[tuple[int, int], nn.Parameter] = {}

    @property
    def weights(self) -> tuple[nn.Parameter | None, ...]:
        """Return the parameter of each group, [out, in]. None: the group is elsewhere."""
        return tuple(
            cast("nn.Parameter | None", self._parameters[str(group)])
            for group in range(self.groups)
        )

    def hold(self, groups: Collection[int]) -> None:
        """Drop the parameters of all other groups."""
        for group in range(self.groups):
            if group not in groups:
                self._parameters[str(group)] = None

    def take_rows(self, blocks: Sequence[tuple[int, int]], own_source: int) -> None:
        """Set source and group of each block of rows, sources together.

        Call it again when a parameter has been replaced. The gradients of `own_source` are those of
        the parameters. Other sources have gradients of their own (`source_gradients`).
        """
        self._blocks, self._own_source = tuple(blocks), own_source
        self._copies = {}
        for source, group in blocks:
            weight = self.weights[group]
            assert weight is not None, "rows come to groups that are held"
            if source != own_source:
                # The same memory, so that the optimizer's writes are seen here.
                self._copies[source, group] = nn.Parameter(
                    weight.detach(), requires_grad=weight.requires_grad
                )
        copies = nn.ParameterList(self._copies.values())
        float32_gradients(copies)

    def source_gradients(self, group: int) -> dict[int, nn.Parameter]:
        """Return, by source, the parameter whose `.grad` is that of the source's rows."""
        weight = self.weights[group]
        own = {self._own_source: weight} if weight is not None else {}
        return own | {source: copy for (source, of), copy in self._copies.items() if of == group}

    def flatten_parameters(self) -> None:
        """Lay the weights behind one another, so that one kernel can compute them (CUDA)."""
        held = [weight for weight in self.weights if weight is not None]
        if held and held[0].is_cuda:
            for weight, data in zip(
                held, torch.stack([weight.detach() for weight in held]), strict=True
            ):
                weight.data = data

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Compute [rows, out] from [rows, in], with `counts` rows in each block."""
        weights = self._block_weights()
        ordinary = all(isinstance(weight, nn.Parameter) for weight in weights)
        tape = self.tape if ordinary and autograd_may_split(x.device) else None
        return cast(
            Tensor, _GroupedFunction.apply(x, tuple(counts), self._per_kernel(), tape, *weights)
        )

    def _block_weights(self) -> list[nn.Parameter]:
        weights, out = self.weights, list[nn.Parameter]()
        for source, group in self._blocks or [
            (self._own_source, group) for group in range(self.groups)
        ]:
            weight = weights[group]
            assert weight is not None, "a group that is elsewhere is not computed here"
            copy = self._copies.get((source, group), weight)
            if copy.requires_grad != weight.requires_grad:  # frozen since, or trained again
                copy.requires_grad_(weight.requires_grad)
            out.append(copy)
        return out

    def _per_kernel(self) -> int:
        """Return the blocks of one source if all have as many, otherwise 1."""
        if self._blocks is None:
            return self.groups
        lengths = {
            len(list(blocks)) for _, blocks in groupby(self._blocks, key=lambda block: block[0])
        }
        return lengths.pop() if len(lengths) == 1 else 1


def gradient_parameters(module: nn.Module) -> list[nn.Parameter]:
    """List the parameters of a module, and those for other sources' rows."""
    copies = [
        copy
        for part in module.modules()
        if isinstance(part, GroupedLinear)
        for copy in part._copies.values()
    ]
    return [*module.parameters(), *copies]


class RowExchange(Protocol):
    """The ranks that send rows to each other. All of them make the same calls."""

    def counts(self, sent: Sequence[Sequence[int]], taken: Sequence[int]) -> list[list[int]]:
        """Send some numbers to each rank, and return those from each, `taken` of them."""
        ...

    def rows(self, rows: Tensor, sent: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Send `sent` rows to each rank, and return `taken` rows of each, in their order."""
        ...


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: Sequence[int], taken: Sequence[int], exchange: RowExchange
    ) -> Tensor:
        ctx.sent, ctx.taken, ctx.exchange = sent, taken, exchange
        return exchange.rows(rows.detach(), sent, taken)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.rows(gradients[0].contiguous(), ctx.taken, ctx.sent), None, None, None


def exchange_rows(
    rows: Tensor, sent: Sequence[int], taken: Sequence[int], exchange: RowExchange
) -> Tensor:
    """Send rows as `RowExchange.rows` does. The gradients go back the same way."""
    return cast(Tensor, _Exchange.apply(rows, sent, taken, exchange))
