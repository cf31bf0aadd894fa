"""Frozen weights that a checkpoint leaves out, because the model's own folder has them.

A layer says so with the attribute `base_folder`. The checkpoint has the folder and a hash of each
weight instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from dynmo.errors import CheckpointError


class BaseWeights(BaseModel):
    """The weights of one layer that are in another folder.

    Attributes:
        folder: The folder of the model.
        hashes: SHA-256 of the bytes of each weight, by name.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    folder: str
    hashes: dict[str, str]


def base_of(module: nn.Module) -> BaseWeights | None:
    """Describes the frozen weights of a layer that its folder has. None if there is no folder."""
    folder: str | None = getattr(module, "base_folder", None)
    if folder is None:
        return None
    frozen = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return BaseWeights(folder=folder, hashes={name: _hash(p) for name, p in frozen.items()})


def from_base(what: str, module: nn.Module, base: BaseWeights | None) -> Mapping[str, Tensor]:
    """Returns the weights that a checkpoint left out, as the module has them.

    Args:
        what: The layer, for messages.
        module: The layer, made from its folder.
        base: What the checkpoint says of them.

    Raises:
        CheckpointError: The module has other weights.
    """
    parameters = dict(module.named_parameters())
    found = dict[str, Tensor]()
    for name, digest in () if base is None else base.hashes.items():
        if name not in parameters or _hash(parameters[name]) != digest:
            assert base is not None
            raise CheckpointError(
                f"{what}: {name} is not the weight that the checkpoint was trained with; it left "
                f"out the frozen weights of {base.folder}, so resume with that folder as it was"
            )
        found[name] = parameters[name].detach()
    return found


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
