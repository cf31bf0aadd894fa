"""The functions of transformers that are not public. No other module imports one.

Tested with the versions of `TESTED`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations import moe

TESTED = ("5.23.0",)


@contextmanager
def experts_on_shapes() -> Generator[None]:
    """Lets experts run on the meta device and on fake tensors.

    torch's grouped product takes only bfloat16 there. transformers has another one.
    """
    before = moe._can_use_grouped_mm
    moe._can_use_grouped_mm = lambda *_: False
    try:
        yield
    finally:
        moe._can_use_grouped_mm = before


@torch.no_grad()
def initialise(model: PreTrainedModel, module: nn.Module) -> None:
    """Sets the first values of a module's parameters and buffers, as the model would."""
    for child in module.children():
        initialise(model, child)
    model._init_weights(module)
