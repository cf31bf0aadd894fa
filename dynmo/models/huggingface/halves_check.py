"""Compares a block with its two halves on real values.

A wrong cut would change numbers silently.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn

from dynmo.errors import ConfigError
from dynmo.models.huggingface.cut import Halves
from dynmo.models.huggingface.frame import Frame
from dynmo.models.huggingface.shells import BlockShell, hidden_of
from dynmo.models.huggingface.skeleton import shallow_copy


def kind_of(block: nn.Module) -> tuple[object, ...]:
    """Returns what blocks of one kind have in common: the classes of their modules."""
    return tuple(type(module) for module in block.modules())


@contextmanager
def evaluated(*parts: nn.Module) -> Generator[None]:
    """Sets modules to evaluation. Each gets its mode back."""
    modes = {module: module.training for part in parts for module in part.modules()}
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


@torch.no_grad()
def check_halves(first: BlockShell, second: BlockShell, halves: Halves) -> None:
    """Checks that two halves with values compute what their block computes.

    Raises:
        ConfigError: They compute other numbers.
    """
    whole = shallow_copy(first.block)
    for name in (halves.main[1], *halves.others[1]):
        whole._modules[name] = second.block._modules[name]
    frame: Frame = first.frame
    like = frame.structure.hidden
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(like.shape, generator=draws)
    args, kwargs = frame.arguments(first.index, hidden, None, None)
    with evaluated(whole, first.block, second.block):
        wanted = hidden_of(whole(hidden, *args, **kwargs))
        half = hidden_of(first.block(hidden, *args, **kwargs))
        found = hidden_of(second.block(half, *args, **kwargs))
    if not torch.equal(wanted, found):
        raise ConfigError(
            f"block {first.index} ({type(first.block).__name__}): its halves compute other numbers "
            'than the whole block; leave blocks whole (cut = "blocks")'
        )
