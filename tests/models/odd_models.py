"""Models of one's own that do what few do: `python:tests.models.odd_models:...`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models.lined import Lined, between


class Do(Lined):
    """A linear, and what `do` makes of its output."""

    def __init__(self, do: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._do = do

    def forward(self, x: Tensor) -> object:
        return self._do(self.linear(x))


class Table(Lined):
    """A buffer in columns, whose sum is rounded otherwise in rows."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
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
    """Hands on columns: [batch, 8, tokens]. Their first dimension in memory is another."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * 1.1).transpose(-1, -2)


class Centred(nn.Module):
    """A module whose rounding depends on how its input lies in memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean((-1, -2), keepdim=True) / (1 + x.square().sum((-1, -2), keepdim=True))
        return y.transpose(-1, -2)


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.first(x), inplace=True)
        return functional.relu(self.second(y), inplace=True)


class OwnNorm(nn.Module):
    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.mean, self.variance, training=self.training)


class Unversioned(nn.Module):
    """Counts its calls through numpy and `.data`, now and then, and reads the count."""

    count: Tensor
    sometimes: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("sometimes", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count.numpy()[0] += 1
        if int(self.count) % 3 == 0:
            self.sometimes.data += self.count
        return x * (1 + 0.01 * self.count + 0.1 * self.sometimes.clone())


class Counting(nn.Module):
    """Counts its calls in a plain attribute, and keeps its last output and a mask."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.linear, self._reads = nn.Linear(8, 8), reads
        self.calls = 0
        self.mask: Tensor | None = None
        self.last: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.mask is None:
            self.mask = torch.ones(x.shape[1], 1)
        y = torch.tanh(self.linear(x)) * self.mask
        self.last[:] = [y.detach()]
        return x + y * (1 + 0.1 * self.calls * self._reads)


class Normed(Lined):
    """A residual block around a norm. The norm takes rows of a shape."""

    def __init__(self, norm: nn.Module, *shape: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self._shape = shape or (8,)
        self._checkpointed = checkpointed

    def _normed(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, *self._shape)).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        y, run = self.linear(x), self._normed
        return x + torch.tanh(
            checkpoint(run, y, use_reentrant=False) if self._checkpointed else run(y)
        )


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.rnn(x)[0]


class Rewriting(nn.Module):
    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self._writes = nn.Linear(8, 8), writes

    def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self._writes:
            ids, x = ids.clone(), x.clone()
        ids.add_(1).remainder_(256)
        x.mul_(0.5)
        x.data.add_(0.25)
        return ids, x + torch.tanh(self.linear(x)) * (1 + ids.unsqueeze(-1) / 256)


class Entry(nn.Module):
    """Hands the token ids on, beside their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids, torch.tanh(self.tokens(ids))


class Exit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(8, 256)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        return self.logits(x)


def columns() -> list[nn.Module]:
    return between(nn.Linear(8, 8), Columns(), Centred(), nn.Linear(8, 8), Columns(), Centred())


def table() -> list[nn.Module]:
    return between(Table(), Table(), Table())


def energy() -> list[nn.Module]:
    return between(Energy(True), Energy(False), Energy(True))


def spectral() -> list[nn.Module]:
    norms = [nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)) for _ in range(2)]
    flat = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (2, 8)))
    return between(*norms, flat, nn.Linear(8, 8))


def statistics() -> list[nn.Module]:
    images = Normed(nn.BatchNorm2d(8), 8, 2, 2)
    flat = map(Normed, (OwnNorm(), nn.BatchNorm1d(8, momentum=None)))
    return between(Normed(nn.BatchNorm1d(8)), images, *flat, Unversioned())


def own_norm() -> list[nn.Module]:
    return between(Normed(OwnNorm()))


def checkpointed() -> list[nn.Module]:
    """Layers whose backward runs parts of them again, which write to buffers."""
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    norms = (nn.BatchNorm1d(8), spectral, OwnNorm())
    return between(*(Normed(norm, checkpointed=True) for norm in norms))


def counting() -> list[nn.Module]:
    return between(Counting(True))


def caching() -> list[nn.Module]:
    return between(Counting(False), Counting(False))


def recurrent() -> list[nn.Module]:
    return between(*map(Recurrent, (nn.LSTM, nn.GRU, nn.RNN)))


def _masked(logits: Tensor, targets: Tensor) -> Tensor:
    """Writes to the targets, and otherwise each time."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.sub_(1).clamp_(min=0).flatten())


def rewriting() -> tuple[list[nn.Module], object]:
    return [Entry(), *(Rewriting(True) for _ in range(3)), Exit()], _masked


def copying() -> tuple[list[nn.Module], object]:
    layers = [Entry(), *(Rewriting(False) for _ in range(3)), Exit()]
    return layers, lambda y, targets: _masked(y, targets.clone())


def rectified() -> list[nn.Module]:
    last = nn.Dropout(0.1, inplace=True), nn.Hardtanh(inplace=True)
    return between(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8), *last)


def in_place() -> list[nn.Module]:
    return between(InPlace(), InPlace())


def a_dict() -> list[nn.Module]:
    return between(Do(lambda y: {"y": y}))


def with_none() -> list[nn.Module]:
    return between(Do(lambda y: (y, None)))


def complex_between() -> list[nn.Module]:
    return between(Do(torch.fft.rfft), Do(torch.real))


def writes_to_the_batch() -> list[nn.Module]:
    class Clamped(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.clamp_(max=100))

    return [Clamped(256, 8), nn.Linear(8, 256)]


def writes_late() -> list[nn.Module]:
    """Layer 1 writes to the ids that it is given, but not in its first microbatch."""

    class Late(Rewriting):
        calls = 0

        def forward(self, ids: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            self.calls += 1
            if self.calls > 1:
                ids.add_(1)
            return ids, self.linear(x)

    return [Entry(), Late(True), Exit()]


def no_graph() -> tuple[list[nn.Module], object]:
    return between(nn.Linear(8, 8)), lambda y, targets: y.detach().mean()


def no_tensor() -> tuple[list[nn.Module], object]:
    return between(nn.Linear(8, 8)), lambda y, targets: y.mean().item()


def renormalised() -> list[nn.Module]:
    return [nn.Embedding(256, 8, max_norm=1.0), nn.Linear(8, 8), nn.Linear(8, 256)]


def narrow() -> list[nn.Module]:
    layer = nn.Linear(8, 8)
    layer.register_buffer("seen", torch.arange(4).to(torch.uint16))
    return between(layer, nn.Linear(8, 8))


def eighths() -> list[nn.Module]:
    layer = nn.Linear(8, 8)
    layer.register_buffer("seen", torch.zeros(4).to(torch.float8_e5m2))
    return between(layer)


class Averaged(Lined):
    """A buffer follows the weight in place, and B needs it as F found it."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", self.linear.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.lerp_(self.linear.weight.detach() + x.detach().mean(), 0.1)
        return self.linear(x) + 0.1 * functional.linear(x, self.average)


def averaged() -> list[nn.Module]:
    return between(Averaged(), Averaged())
