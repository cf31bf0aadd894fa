"""A model whose batches lose their padding. Every microbatch has another number of tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.models.lined import Lined


class DropPadding(nn.Module):
    """[batch, sequence] ids -> the tokens that count, and their places."""

    varying_shapes = True

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 8)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        places = (ids.flatten() % 3 != 0).nonzero().squeeze(1)
        return self.tokens(ids.flatten()[places]), places


class Mix(Lined):
    varying_shapes = True

    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.linear(x)), places


class Undeclared(Mix):
    varying_shapes = False


class Out(Lined):
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), places


def _loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, places = output
    kept = targets.flatten()[places]
    return functional.cross_entropy(logits, kept, reduction="sum") / targets.numel()


def ragged() -> tuple[list[nn.Module], object]:
    return [DropPadding(), Mix(), Mix(), Mix(), Out(256)], _loss


def undeclared() -> tuple[list[nn.Module], object]:
    return [DropPadding(), Undeclared(), Undeclared(), Undeclared(), Out(256)], _loss
