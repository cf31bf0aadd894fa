"""The values of new tensors: a mark, until the code of transformers or peft, or a file, sets them.

A tensor that all of them forget would be arbitrary. The mark shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError


def has_no_values() -> bool:
    """True while new tensors are fake: they have shapes, but no values."""
    return type(torch.empty(0)) is not Tensor


def marked(like: Tensor) -> Tensor:
    """Returns a tensor on the CPU that has no value yet."""
    return torch.full(like.shape, _mark(like.dtype), dtype=like.dtype, device="cpu")


def check_values(module: nn.Module, path: str = "") -> None:
    """Refuses parameters and buffers that have no value yet. Fake tensors have none.

    Args:
        path: Path of the module in the model.
    """
    if has_no_values():
        return
    for name in _without_value(module.named_buffers()):
        raise ConfigError(
            f"the buffer {f'{path}.{name}'.lstrip('.')} has no value, because the model's "
            "_init_weights does not set it; make it persistent"
        )
    for name in _without_value(module.named_parameters()):
        raise ConfigError(
            f"{name} cannot be drawn, because the model's _init_weights does not set it; give a "
            "folder of weights"
        )


def _mark(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _without_value(named: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
    """Yields the names of tensors whose ends have the mark."""
    for name, tensor in named:
        if tensor.dtype == torch.bool or tensor.is_meta or not tensor.numel():
            continue
        ends = tensor.detach().flatten()[[0, -1]]
        mark = torch.full_like(ends, _mark(tensor.dtype))
        if torch.isclose(ends, mark, rtol=0, atol=0, equal_nan=True).any():
            yield name
