"""Models of one's own that do what few do, as `model.kind = "python:tests.models.odd_models:..."` finds them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Do(nn.Module):
    """A linear, and what `do` makes of its output."""

    def __init__(self, do: Callable[[Tensor], object], width: int = 8) -> None:
        super().__init__()
        self.linear, self._do = nn.Linear(8, width), do

    def forward(self, x: Tensor) -> object:
        return self._do(self.linear(x))


class Table(nn.Module):
    """A buffer in columns, whose sum is rounded otherwise in rows."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(8, 640).t() * 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.table.sum(0) + self.table.square().sum()


class Energy(nn.Module):
    """Adds the slope of an energy, by a backward of its own within F."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.linear, self._create_graph = nn.Linear(8, 8), create_graph

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.linear(z)).square().sum()
            (slope,) = torch.autograd.grad(energy, z, create_graph=self._create_graph)
        return self.linear(x) + 0.1 * slope


class Columns(nn.Module):
    """Hands on columns: [batch, 8, tokens] of which the first dimension in memory is another."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 1.1).transpose(-1, -2)


class Centred(nn.Module):
    """Whose sums are rounded as its input lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean((-1, -2), keepdim=True) / (1 + x.square().sum((-1, -2), keepdim=True))
        return y.transpose(-1, -2)


class InPlace(nn.Module):
    """The same with and without working in place."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.first, self.second, self._inplace = nn.Linear(8, 16), nn.Linear(16, 8), inplace

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.second(functional.relu(self.first(x), inplace=self._inplace)), inplace=self._inplace)


def _model(*middle: nn.Module) -> list[nn.Module]:
    return [nn.Embedding(256, 8), *middle, nn.Linear(8, 256)]


def columns() -> list[nn.Module]:
    return _model(nn.Linear(8, 8), Columns(), Centred(), nn.Linear(8, 8), Columns(), Centred())


def table() -> list[nn.Module]:
    return _model(Table(), Table(), Table())


def energy() -> list[nn.Module]:
    return _model(Energy(True), Energy(False), Energy(True))


def spectral() -> list[nn.Module]:
    """Buffers that each forward writes to, and reads: power iterations; running statistics."""
    norms = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(2)]
    return _model(*norms, nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (2, 8))), nn.Linear(8, 8))


def in_place() -> list[nn.Module]:
    return _model(InPlace(True), InPlace(True))


def not_in_place() -> list[nn.Module]:
    return _model(InPlace(False), InPlace(False))


def a_dict() -> list[nn.Module]:
    return _model(Do(lambda y: {"y": y}))


def with_none() -> list[nn.Module]:
    return _model(Do(lambda y: (y, None)))


def complex_between() -> list[nn.Module]:
    return _model(Do(torch.fft.rfft), Do(torch.real, 8))


def writes_to_the_batch() -> list[nn.Module]:
    class Clamped(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.clamp_(max=100))

    return [Clamped(256, 8), nn.Linear(8, 256)]


def no_graph() -> tuple[list[nn.Module], object]:
    return _model(nn.Linear(8, 8)), lambda y, targets: y.detach().mean()


def no_tensor() -> tuple[list[nn.Module], object]:
    return _model(nn.Linear(8, 8)), lambda y, targets: y.mean().item()


def renormalised() -> list[nn.Module]:
    return [nn.Embedding(256, 8, max_norm=1.0), nn.Linear(8, 8), nn.Linear(8, 256)]


def narrow() -> list[nn.Module]:
    layer = nn.Linear(8, 8)
    layer.register_buffer("seen", torch.arange(4).to(torch.uint16))
    return _model(layer, nn.Linear(8, 8))


def eighths() -> list[nn.Module]:
    layer = nn.Linear(8, 8)
    layer.register_buffer("seen", torch.zeros(4).to(torch.float8_e5m2))
    return _model(layer)
