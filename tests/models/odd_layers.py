"""Layers that are built, or handed on, in ways that few are, for `model.kind`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models.lined import Lined, between


def _factories(*middle: Callable[[], nn.Module]) -> list[Callable[[], nn.Module]]:
    return [partial(nn.Embedding, 256, 8), *middle, partial(nn.Linear, 8, 256)]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Sequential(self.a, nn.GELU(), self.a)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(self.a(x))


def shared() -> list[nn.Module]:
    return between(Shared(), Shared(), Shared())


class Attributes(nn.Module):
    """Keeps tensors that are neither parameters nor buffers. It asks for the value of one."""

    def __init__(self, asks: bool = False) -> None:
        super().__init__()
        self.linear, self.table, self.rows = nn.Linear(8, 8), torch.arange(8) / 10, [torch.randn(8)]
        shift = torch.randn(8)
        self.shifted = lambda x: x + shift  # pyright: ignore[reportUnknownLambdaType]
        self.scale = float(torch.tensor(0.5)) if asks else 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.shifted(self.linear(x) * self.scale + self.table * self.rows[0])


def attributes() -> list[Callable[[], nn.Module]]:
    return _factories(Attributes, Attributes, partial(Attributes, True))


class Aux(nn.Linear):
    """Hands on an auxiliary loss as it came, or begins one."""

    def forward(self, input: Tensor, aux: Tensor | None = None) -> Any:
        return super().forward(input), input.square().mean() if aux is None else aux


def aux_loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, aux = output
    return functional.cross_entropy(logits.reshape(-1, 256), targets.reshape(-1)) + 0.1 * aux


def aux() -> tuple[list[nn.Module], object]:
    return [nn.Embedding(256, 8), Aux(8, 8), Aux(8, 8), Aux(8, 256)], aux_loss


class Spread(nn.Module):
    """Hands on what it got, and so many multiples of it."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), count

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, *(self.linear(x) * i for i in range(self.count))


class Sum(nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return sum(tensors[1:], tensors[0])


class Passed(nn.Module):
    def forward(self, *tensors: Tensor) -> list[Tensor]:
        return list(tensors)


def many() -> list[nn.Module]:
    return between(Spread(40), Passed(), Sum(), Spread(2), Sum())


def too_many() -> list[nn.Module]:
    return between(Spread(5000), Sum())


class Kinds(nn.Module):
    def __init__(self, ends: bool = False) -> None:
        super().__init__()
        self.linear, self.ends = nn.Linear(8, 8), ends

    def forward(self, x: Tensor, *others: Tensor) -> Any:
        if not others:
            kinds = "int16 uint8 uint16 uint32 int8 int32 float16 bfloat16"
            numbers = [(x[0, 0] * 3).abs().to(getattr(torch, kind)) for kind in kinds.split()]
            parts = (x[:0], x[:, :0].double(), x.double()[0].t())
            others = (x > 0, x.mean(), *parts, torch.tensor(2), *numbers)
        y = x + self.linear(x).masked_fill(others[0], 0.0) * others[1]
        return (
            y + sum(other.float().sum() for other in others) * 0.01 if self.ends else (y, *others)
        )


def kinds() -> list[nn.Module]:
    return between(Kinds(), Kinds(), Kinds(), Kinds(True))


class Taped(nn.Module):
    def __init__(self, tape: object) -> None:
        super().__init__()
        self.linear, self.tape = nn.Linear(8, 8), tape

    def forward(self, x: Tensor) -> Tensor:
        return self.tape(self.linear(x)) if isinstance(self.tape, nn.Module) else self.linear(x)


def tapes() -> list[nn.Module]:
    tapes = (nn.Linear(8, 8), [1], None, nn.Parameter(torch.ones(2)))
    return between(*map(Taped, tapes))


class Doubled(Lined):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.functional_call(self.linear, {"weight": self.linear.weight * 2}, (x,))


class Mapped(Lined):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(self.linear)(x)


def transformed() -> list[nn.Module]:
    return between(Doubled(), Mapped(), Doubled())


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        return gradients[0] * gate, (gradients[0] * x).sum((0, 1))


def _raised(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    return output * 1.5


def _lowered(module: nn.Module, into: Any, out: Any) -> Any:
    return tuple(None if g is None else g / 2 for g in into)


class Containers(nn.Module):
    """Modules and parameters in torch's containers, hooks and parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        line = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(8), "line": line})
        self.lines = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.gates = nn.ParameterList([torch.randn(8), torch.randn(())])
        self.lines[0].register_forward_hook(_raised)
        self.lines[1].register_full_backward_hook(_lowered)
        self.register_buffer("seen", None, persistent=False)

    def _inner(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = x + line(x).tanh()
        return x

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            self.seen = torch.ones(8)
        x = checkpoint(self._inner, x, use_reentrant=False) * self.seen
        return _Gate.apply(self.parts["line"](self.parts["norm"](x)), self.gates[0]) * self.gates[1]


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def containers() -> list[nn.Module]:
    return between(Containers(), Same(), Containers(), Same())


def encoders() -> list[nn.Module]:
    return between(*[nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(3)])


class ByItself(Lined):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.linear(x), self.linear.weight)


def by_itself() -> list[nn.Module]:
    return between(ByItself(), ByItself())


class Counting(nn.Module):
    """Counts in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(8, 8), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class CachedAside(nn.Linear):
    """Makes a table in its first forward, in a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("table", None, persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 8)
        return input + super().forward(input) * self.table


def cached_aside() -> list[nn.Module]:
    return between(CachedAside())


def counting() -> list[nn.Module]:
    return between(Counting(), Counting())


def eighths() -> list[nn.Module]:
    class Low(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).to(torch.float8_e5m2)

    return between(Low(8, 8))


def sparse() -> list[nn.Module]:
    class Sparse(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).to_sparse()

    return between(Sparse(8, 8))


def empty() -> list[nn.Module]:
    class Empty(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return ()

    return between(Empty(8, 8))


class Keyed(Lined):
    def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.linear(x) * scale


def keyed() -> list[nn.Module]:
    return between(Keyed())


def scripted() -> list[nn.Module]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return between(torch.jit.script(nn.Linear(8, 8)))
