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

from dynmo.models.huggingface.skeleton import overlaid

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
def initialise(model: PreTrainedModel, module: nn.Module, path: str = "") -> None:
    """Sets the first values of a module's parameters and buffers, as the model would.

    Args:
        path: Path of the module in the model. A layer has the paths of the model.
    """
    for name, child in module.named_children():
        initialise(model, child, f"{path}.{name}".lstrip("."))
    # A model may initialise parts of its blocks itself, and looks for them in its lists.
    is_holder = type(module) is nn.Module
    whole = overlaid(model.get_submodule(path), module) if is_holder else module
    initialise_own(model, whole, path)


@torch.no_grad()
def initialise_own(model: PreTrainedModel, module: nn.Module, path: str) -> None:
    """Sets the first values of a module's own parameters and buffers, but not of its parts.

    A model may hold other models, such as one for images. Each initialises its own modules.
    """
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        holder = model.get_submodule(".".join(parts[:depth]))
        if isinstance(holder, PreTrainedModel):
            holder._init_weights(module)
            return
