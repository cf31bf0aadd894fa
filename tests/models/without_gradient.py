"""A model of which some parameters get no gradient, in all steps or in some."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.lined import Lined

HIDDEN = 8


class Classes(Lined):
    """Hands on integers, so nothing flows back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).argmax(-1)


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(HIDDEN, HIDDEN)
        self.unused = nn.Parameter(torch.ones(HIDDEN, HIDDEN))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(ids), ids


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.first(x)), self.second(x), ids


class Sometimes(Lined):
    """Detaches most microbatches, and all of some steps."""

    def forward(self, x: Tensor, ignored: Tensor, ids: Tensor) -> Tensor:
        return self.linear(x if int(ids.sum()) % 6 == 0 else x.detach())


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    first = nn.Embedding(256, HIDDEN)
    return [first, Classes(), Lookup(), Pair(), Sometimes(), nn.Linear(HIDDEN, 256)]
