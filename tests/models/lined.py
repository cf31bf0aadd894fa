"""The parts of small models of one's own."""

from __future__ import annotations

from torch import nn


class Lined(nn.Module):
    def __init__(self, outputs: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(8, outputs)


def between(*middle: nn.Module) -> list[nn.Module]:
    """Layers between an embedding and a head."""
    return [nn.Embedding(256, 8), *middle, nn.Linear(8, 256)]
