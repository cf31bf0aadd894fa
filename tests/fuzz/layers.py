"""Layers of the random test's models: [microbatch, sequence, WIDTH] in and out.

Each stands for something that models of one's own do: buffers, hooks, shared weights, own autograd
functions, dropout. `LAYERS` names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

import dynmo
from dynmo.kernels.split import WeightTape, add_product
from tests.kernels import own_products
from tests.kernels.own_products import Own, Product

WIDTH = 8
VOCAB = 256


class Apply(nn.Module):
    """x + function(modules, x). The function is any code that a forward may have."""

    def __init__(
        self, function: Callable[[nn.ModuleDict, Tensor], Tensor], **modules: nn.Module
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(modules)
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self._function(self.parts, x)


def square_linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Channels(nn.Module):
    """Runs a module that wants its channels in dimension 1.

    The input is [microbatch, WIDTH, sequence, ...].
    """

    def __init__(self, module: nn.Module, dimensions: int = 1) -> None:
        super().__init__()
        self.linear, self.module, self._dimensions = square_linear(), module, dimensions

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).transpose(1, 2)
        if self._dimensions == 2:
            return x + self.module(y.unsqueeze(-1)).squeeze(-1).transpose(1, 2)
        return x + self.module(y).transpose(1, 2)


class WithLinear(nn.Module):
    """A layer with one linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = square_linear()


class OwnBatchNorm(WithLinear):
    """`functional.batch_norm` on buffers of its own, which torch updates in place."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).transpose(1, 2)
        y = functional.batch_norm(y, self.mean, self.variance, training=self.training)
        return x + y.transpose(1, 2)


class Counted(WithLinear):
    """Buffers: a count of forwards, and a mean that is replaced by a new tensor."""

    count: Tensor
    mean: Tensor

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=persistent)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * y.detach().float().mean((0, 1))
        return x + torch.tanh(y - self.mean.to(y.dtype)) / (1 + 0.01 * self.count.to(y.dtype))


class Recurrent(nn.Module):
    """A recurrent module, without the state that it also returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return x + self.module(x)[0][..., :WIDTH]


class Block(nn.TransformerEncoderLayer):
    """A position sees itself and those before it."""

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Shared(nn.Module):
    """One linear used by itself and within a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.a = square_linear()
        self.b = nn.Sequential(self.a, nn.GELU(), self.a)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


class Square(torch.autograd.Function):
    """x^2 with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


class Halve(torch.autograd.Function):
    """Halves its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * 0.5


class OwnMatmul(torch.autograd.Function):
    """A product whose weight gradient is computed in its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class OwnWeight(nn.Module):
    """A layer with a weight of its own and a weight without dimensions.

    A part of it never trains.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.fixed = square_linear().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * OwnMatmul.apply(self.fixed(x), self.weight)


class Registered(nn.Module):
    """A layer whose product has a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.product(x))

    def product(self, x: Tensor) -> Tensor:
        return cast(Tensor, OwnMatmul.apply(x, self.weight))


class SplitRegistered(Registered):
    """Leaves the weight gradient on the tape."""

    tape: WeightTape | None = None

    def product(self, x: Tensor) -> Tensor:
        if self.tape is None or not torch.is_grad_enabled():
            return super().product(x)
        return cast(Tensor, SplitMatmul.apply(x, self.weight, self.tape))


class SplitMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, tape: WeightTape) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        ctx.weight, ctx.tape = weight, tape
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,), weight = ctx.saved_tensors, ctx.weight
        given = gradient @ weight.t()
        left, right = x.flatten(0, -2).t(), gradient.flatten(0, -2)
        if not ctx.tape.takes(weight):
            return given, left @ right, None
        ctx.tape.add(partial(add_product, weight, left, right), x, gradient)
        return given, None, None


dynmo.register_split(Registered, SplitRegistered)


class Plain(WithLinear):
    """A tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.linspace(0.5, 1.5, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x) * self.table.to(x.dtype)


class Energy(WithLinear):
    """Adds the slope of an energy, by a backward of its own within F."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(z)).square().sum()
            (slope,) = torch.autograd.grad(energy, z, create_graph=True)
        return x + 0.1 * slope


class Routed(nn.Module):
    """Each token goes to one of two linears, one of which may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(square_linear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        choice, out = weights.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            chosen = choice == index
            if chosen.any():
                out[chosen] = expert(x[chosen]) * weights[chosen][:, index, None]
        return x + out


class Skipped(WithLinear):
    """Is left out now and then, by torch's random numbers, as in stochastic depth."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(torch.rand(())) < 0.3:
            return x
        return x + self.linear(x)


class Tokens(nn.Module):
    """Looks up what its input rounds to.

    There are integers within a layer, and a second embedding.
    """

    def __init__(self, kind: type[nn.Embedding] = nn.Embedding, **options: Any) -> None:
        super().__init__()
        self.table = kind(4, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.detach().float().sum(-1) * 2).long() % 4)


class Scaled(nn.Embedding):
    """As Gemma's embedding."""

    def forward(self, input: Tensor) -> Tensor:
        return 3.0 * super().forward(input)


class Columns(WithLinear):
    """Hands on a tensor that lies in memory by columns."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).transpose(1, 2).contiguous().transpose(1, 2)


class Hooked(WithLinear):
    """A forward hook changes the output of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_hook(_double)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


def _double(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return 2 * output


class Averaged(WithLinear):
    """A buffer follows the layer's weight, and its output is part of the layer's."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(self.linear.weight.detach().to(self.average.dtype), 0.1)
        return x + self.linear(x) + 0.1 * functional.linear(x, self.average.to(x.dtype))


class Doubled(nn.Linear):
    """A subclass of a linear."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class BackwardHooked(WithLinear):
    """A hook changes a gradient on its way back."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if y.requires_grad:
            y.register_hook(lambda gradient: 0.5 * gradient)
        return x + y


def _cells(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    """A recurrent cell in a loop of Python."""
    state, states = torch.zeros_like(x[:, 0]), list[Tensor]()
    for position in x.unbind(1):
        state = parts["cell"](position, state)
        states.append(state)
    return torch.stack(states, 1)


def _wide(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    """Computes in float64."""
    return parts["linear"](x.double()).to(x.dtype)


def _reused(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    linear = parts["linear"]
    assert isinstance(linear, nn.Linear)
    return linear(torch.tanh(linear(x))) + x @ linear.weight


def _aside(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = torch.sigmoid(parts["linear"](x)).mean(-1, keepdim=True)
    return parts["linear"](x.detach()) * scale + parts["other"](x)


def _in_place(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    y = functional.relu(parts["first"](x), inplace=True)
    y = parts["second"](y)
    y += x
    return y.mul_(0.5).clamp_(-3, 3)


def _checkpointed(parts: nn.ModuleDict, x: Tensor, reentrant: bool) -> Tensor:
    if reentrant and not x.requires_grad:  # torch would warn
        return parts["inner"](x)
    result = checkpoint(parts["inner"], x, use_reentrant=reentrant)
    assert isinstance(result, Tensor)
    return result


def _bounded(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    return torch.tanh(parts["linear"](x))


def _own(run: Product, *shapes: tuple[int, ...], **options: bool) -> Kind:
    """A kind of layer that multiplies by matrices of its own."""
    return Kind(lambda: Apply(_bounded, linear=Own(run, *shapes)), **options)


def _spectrum(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(parts["linear"](x).float(), dim=-1) * 0.5, n=WIDTH).to(
        x.dtype
    )


def _branch(parts: nn.ModuleDict, x: Tensor) -> Tensor:
    # After a norm the sum of all is 0 but for rounding.
    chosen = "first" if float(x.detach()[..., 0].sum()) > 0 else "second"
    return parts[chosen](x)


def _mlp(dropout: float = 0.0) -> nn.Sequential:
    parts = [
        nn.Linear(WIDTH, 2 * WIDTH),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(2 * WIDTH, WIDTH),
    ]
    return nn.Sequential(*parts)


@dataclass(frozen=True)
class Kind:
    """A kind of layer.

    Attributes:
        make: Makes one.
        writes: Its forward writes to buffers, so replicas refuse it and frozen outputs are not
            kept.
        draws: Its forward draws random numbers.
        low: It computes in bfloat16 and float16 as well.
        prunes: Its linears can be pruned: it calls them, and differentiates them once.
    """

    make: Callable[[], nn.Module]
    writes: bool = False
    draws: bool = False
    low: bool = True
    prunes: bool = True


_norms = nn.utils.parametrizations

LAYERS: dict[str, Kind] = {
    "linear": Kind(square_linear),
    "mlp": Kind(_mlp),
    "bare": Kind(nn.GELU),
    "identity": Kind(nn.Identity),
    "layer_norm": Kind(partial(nn.LayerNorm, WIDTH)),
    "rms_norm": Kind(partial(nn.RMSNorm, WIDTH)),
    "group_norm": Kind(lambda: Channels(nn.GroupNorm(2, WIDTH))),
    "batch_norm": Kind(lambda: Channels(nn.BatchNorm1d(WIDTH)), writes=True, low=False),
    "batch_norm_2d": Kind(
        lambda: Channels(nn.BatchNorm2d(WIDTH), dimensions=2), writes=True, low=False
    ),
    "batch_norm_mean": Kind(
        lambda: Channels(nn.BatchNorm1d(WIDTH, momentum=None)), writes=True, low=False
    ),
    "batch_norm_own": Kind(OwnBatchNorm, writes=True),
    "instance_norm": Kind(
        lambda: Channels(nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)),
        writes=True,
    ),
    "counted": Kind(lambda: Counted(True), writes=True),
    "counted_aside": Kind(lambda: Counted(False), writes=True),
    "lstm": Kind(lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True))),
    "lstm_deep": Kind(
        lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, bidirectional=True))
    ),
    "gru": Kind(lambda: Recurrent(nn.GRU(WIDTH, WIDTH, batch_first=True))),
    "rnn": Kind(lambda: Recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True))),
    "weight_norm": Kind(lambda: Apply(_bounded, linear=_norms.weight_norm(square_linear()))),
    "spectral_norm": Kind(
        lambda: Apply(_bounded, linear=_norms.spectral_norm(square_linear())),
        writes=True,
        low=False,
    ),
    "in_place": Kind(lambda: Apply(_in_place, first=square_linear(), second=square_linear())),
    "dropout_in_place": Kind(
        lambda: nn.Sequential(square_linear(), nn.Dropout(0.1, inplace=True)), draws=True
    ),
    "halved": Kind(lambda: Apply(lambda p, x: Halve.apply(p["linear"](x)), linear=square_linear())),
    "square": Kind(
        lambda: Apply(lambda p, x: Square.apply(torch.tanh(p["linear"](x))), linear=square_linear())
    ),
    "own_weight": Kind(OwnWeight),
    "shared": Kind(Shared),
    "checkpointed": Kind(lambda: Apply(partial(_checkpointed, reentrant=False), inner=_mlp())),
    "checkpointed_dropout": Kind(
        lambda: Apply(partial(_checkpointed, reentrant=False), inner=_mlp(0.1)), draws=True
    ),
    "checkpointed_reentrant": Kind(
        lambda: Apply(partial(_checkpointed, reentrant=True), inner=_mlp())
    ),
    "transformer": Kind(lambda: Block(WIDTH, 2, 16, dropout=0.0, batch_first=True)),
    "transformer_dropout": Kind(
        lambda: Block(WIDTH, 2, 16, batch_first=True, norm_first=True), draws=True
    ),
    "attention": Kind(Attention),
    "plain": Kind(Plain),
    "energy": Kind(Energy, prunes=False),
    "routed": Kind(Routed),
    "branch": Kind(lambda: Apply(_branch, first=square_linear(), second=square_linear())),
    "dropout": Kind(lambda: nn.Dropout(0.1), draws=True),
    "skipped": Kind(Skipped, draws=True),
    "tokens": Kind(Tokens),
    "renormalised": Kind(lambda: Tokens(max_norm=1.0), writes=True),  # its forward writes to it
    "averaged": Kind(Averaged, writes=True, prunes=False),
    "cells": Kind(lambda: Apply(_cells, cell=nn.GRUCell(WIDTH, WIDTH))),
    "lstm_dropout": Kind(
        lambda: Recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.1)), draws=True
    ),
    "subclass": Kind(lambda: Apply(_bounded, linear=Doubled(WIDTH, WIDTH))),
    "backward_hook": Kind(BackwardHooked),
    "reused": Kind(lambda: Apply(_reused, linear=square_linear()), prunes=False),
    "aside": Kind(lambda: Apply(_aside, linear=square_linear(), other=square_linear())),
    "orthogonal": Kind(
        lambda: Apply(_bounded, linear=_norms.orthogonal(square_linear())), low=False
    ),
    "prelu": Kind(lambda: Channels(nn.PReLU(WIDTH))),
    "bilinear": Kind(
        lambda: Apply(
            lambda p, x: torch.tanh(p["product"](x, x)), product=nn.Bilinear(WIDTH, WIDTH, WIDTH)
        )
    ),
    "tokens_padded": Kind(lambda: Tokens(padding_idx=1)),
    "tokens_scaled": Kind(lambda: Tokens(Scaled, padding_idx=2)),
    "columns": Kind(Columns),
    "hooked": Kind(Hooked),
    "wide": Kind(
        lambda: Apply(_wide, linear=nn.Linear(WIDTH, WIDTH, dtype=torch.float64)), low=False
    ),
    "spectrum": Kind(lambda: Apply(_spectrum, linear=square_linear())),
    "convolution": Kind(lambda: Channels(nn.Conv1d(WIDTH, WIDTH, 3, padding=1))),
    "attention_widths": Kind(lambda: Attention(kdim=WIDTH, vdim=WIDTH, add_bias_kv=True)),
    "attention_zero": Kind(lambda: Attention(bias=False, add_zero_attn=True)),
    "conv1d": Kind(lambda: Apply(_bounded, linear=Conv1D(WIDTH, WIDTH))),
    "registered": Kind(Registered),
    "own_addmm": _own(own_products.addmm, (WIDTH,), (WIDTH, WIDTH)),
    "own_matmul": _own(own_products.matmul, (WIDTH, 12), (WIDTH, 12)),
    "own_views": _own(own_products.views, (2 * WIDTH, WIDTH)),
    "own_experts": _own(own_products.experts, (3, WIDTH, WIDTH)),
    "own_grouped": _own(own_products.grouped, (3, WIDTH, WIDTH)),
    "own_twice": _own(own_products.twice, (WIDTH, WIDTH)),
    "own_by_itself": _own(own_products.by_itself, (WIDTH, WIDTH)),
    "own_squared": _own(own_products.squared, (WIDTH, WIDTH)),
    "own_expanded": _own(own_products.expanded, (1, WIDTH)),
    "own_checkpointed": _own(own_products.checkpointed, (WIDTH, WIDTH), (WIDTH, WIDTH)),
    "own_checkpointed_reentrant": _own(
        own_products.checkpointed_reentrant, (WIDTH, WIDTH), (WIDTH, WIDTH)
    ),
    "own_slope": _own(own_products.slope, (3, WIDTH, WIDTH)),
}


@cache
def can_prune(parts: tuple[str, ...]) -> bool:
    """True if layers with this name have a linear to prune.

    None of them may have a linear that must not be pruned.
    """
    kinds = [LAYERS[word] for word in parts if word in LAYERS]
    modules = [part for kind in kinds for part in kind.make().modules()]
    linears = [part for part in modules if type(part) is nn.Linear and "weight" in part._parameters]
    return all(kind.prunes for kind in kinds) and bool(linears or len(parts) > len(kinds))
