"""Models of a user's own. `model.kind = "python:tests.models.user_model:..."` finds them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from dynmo.models.gpt import FeedForwardHalf
from dynmo.models.options import ModelOptions
from tests.models.lined import between


class Scaled(nn.Module):
    """A layer with a frozen part, buffers and a weight without dimensions."""

    shift: Tensor
    turn: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.randn(8))
        self.register_buffer("turn", torch.polar(torch.ones(8), torch.randn(8)))

    def forward(self, x: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return self.fixed(self.line(x)) * self.scale + self.shift * self.turn.real, skip


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids)
        return x, x * 0.1


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Linear(8, 256)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.logits(x + skip)


def layers() -> list[nn.Module]:
    return [First(), Scaled(), Scaled(), Scaled(), Last()]


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    return (functional.softmax(logits, -1) - functional.one_hot(targets, 256)).square().mean()


def with_a_loss() -> tuple[nn.Sequential, object]:
    return nn.Sequential(*between()), squared


def weighted() -> tuple[list[nn.Module], nn.Module]:
    drops = [x.item() for x in torch.linspace(0, 0.25, 2)]
    loss = nn.CrossEntropyLoss(weight=torch.arange(256.0))
    return [nn.Embedding(256, 8), nn.Linear(8, 256), *map(nn.Dropout, drops)], loss


def with_weights() -> tuple[list[nn.Module], nn.Module]:
    return between(), nn.CrossEntropyLoss(weight=torch.arange(256.0))


class Counted(nn.Linear):
    created: ClassVar[list[str]] = []

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.created.append(self.weight.device.type)


def factories() -> tuple[list[Callable[[], nn.Module]], nn.Module]:
    loss = nn.CrossEntropyLoss(weight=torch.arange(256.0))
    return [partial(nn.Embedding, 256, 8), Counted, Counted, lambda: nn.Linear(8, 256)], loss


def mixed() -> list[object]:
    return [nn.Embedding(256, 8), Counted]


def broken_factory() -> list[Callable[[], nn.Module]]:
    def broken() -> nn.Module:
        raise ValueError("no such width")

    return [partial(nn.Embedding, 256, 8), broken]


def odd_factory() -> list[Callable[[], object]]:
    return [partial(nn.Embedding, 256, 8), lambda: 3]


def trained_loss() -> tuple[list[nn.Module], nn.Module]:
    return [nn.Embedding(256, 8), nn.Linear(8, 256)], nn.AdaptiveLogSoftmaxWithLoss(256, 256, [16])


def complex_weight() -> list[nn.Module]:
    parameter = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    return [nn.Embedding(256, 8), nn.ParameterList([parameter])]


def lazy() -> list[nn.Module]:
    return [nn.Embedding(256, 8), nn.LazyLinear(8)]


def sparse() -> list[nn.Module]:
    return [nn.Sequential(nn.Embedding(256, 8, sparse=True)), nn.Linear(8, 256)]


def sharing() -> list[nn.Module]:
    built = layers()
    built[2].line = built[1].line
    return built


class Remembers(nn.Module):
    """Its forward may fill the buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", None)


def sharing_later() -> list[nn.Module]:
    last = Remembers()
    return [nn.Embedding(256, 8), last, last, nn.Linear(8, 256)]


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight


def sharing_inside() -> list[nn.Module]:
    return [nn.Embedding(256, 8), Aliased(), nn.Linear(8, 256)]


def bare() -> list[nn.Module]:
    return [nn.Embedding(256, 8), nn.GELU(), nn.Linear(8, 256)]


def hooked() -> list[nn.Module]:
    linear = nn.Linear(8, 8)
    linear.weight.register_hook(torch.neg)
    return [nn.Embedding(256, 8), linear, nn.Linear(8, 256)]


def no_list() -> dict[str, nn.Module]:
    return {"a": nn.Linear(1, 1)}


def empty() -> list[nn.Module]:
    return []


def not_modules() -> list[object]:
    return [nn.Linear(1, 1), "a"]


def broken() -> list[nn.Module]:
    raise KeyError("nothing here")


number = 3


def halves() -> list[nn.Module]:
    """Layers of a GPT, one class of them."""
    options = ModelOptions(blocks=1, hidden=32, init_std=0.2, dropout=0.1)
    middle = [FeedForwardHalf(options) for _ in range(3)]
    return [nn.Embedding(256, 32), *middle, nn.Linear(32, 256)]
