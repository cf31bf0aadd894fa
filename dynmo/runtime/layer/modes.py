"""Training and evaluation mode of a layer's modules, as their owner set them.

A step that trains leaves the modes as they are. Modes travel as the names of the modules that
evaluate, since most layers have none.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager

from torch import nn


def evaluating_parts(layer: nn.Module) -> list[str]:
    """Returns the names of the modules in evaluation mode. The layer itself is ""."""
    return [name for name, module in layer.named_modules() if not module.training]


def set_modes(layer: nn.Module, evaluating: Collection[str]) -> None:
    """Sets the mode of each module that has another, through the module's own `train`."""
    for name, module in layer.named_modules():
        if module.training == (name in evaluating):
            module.train(name not in evaluating)


@contextmanager
def evaluated(layers: Iterable[nn.Module]) -> Generator[None]:
    """Puts layers into evaluation mode, and their modes back afterwards."""
    before = [(layer, evaluating_parts(layer)) for layer in layers]
    try:
        for layer, _ in before:
            layer.eval()
        yield
    finally:
        for layer, evaluating in before:
            set_modes(layer, evaluating)
