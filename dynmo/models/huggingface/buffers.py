"""Buffers that no file has. The model's own code must give them their values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError


def unset_buffer(like: Tensor) -> Tensor:
    """Returns a buffer on the CPU with values that no model has."""
    return torch.full(like.shape, _mark(like.dtype), dtype=like.dtype, device="cpu")


def check_buffers(module: nn.Module, path: str = "") -> None:
    """Refuses buffers that still have no values.

    Args:
        path: Path of the module in the model.
    """
    for name, buffer in module.named_buffers():
        mark = torch.tensor(_mark(buffer.dtype), dtype=buffer.dtype)
        if buffer.dtype == torch.bool or not buffer.numel() or buffer.is_meta:
            continue
        if torch.isclose(buffer, mark, rtol=0, atol=0, equal_nan=True).all():
            raise ConfigError(
                f"the buffer {f'{path}.{name}'.lstrip('.')} is in no file, and the model's "
                "_init_weights does not set it; make it persistent"
            )


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min
