"""Copies of layers without the values of their parameters and buffers."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynmo.models.model import named_tensors


def without_memory(layer: nn.Module) -> nn.Module:
    """Returns a copy on the meta device. Other tensors that the layer keeps stay real.

    torch refuses to copy a tensor that was computed from parameters, such as the weight that
    `torch.nn.utils.weight_norm` sets before each forward.
    """
    computed = {
        id(value): _empty(value, "meta")
        for part in layer.modules()
        for value in vars(part).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(layer, computed | _emptied(layer, "meta")).to("meta")


def as_fakes(layer: nn.Module) -> nn.Module:
    """Returns a copy all of whose tensors are fake. Works in a FakeTensorMode only."""
    with _EmptyCopies():
        return copy.deepcopy(layer, _emptied(layer, "cpu"))


def _emptied(layer: nn.Module, device: str) -> dict[int, Any]:
    """Returns an empty tensor for each parameter and buffer, by its id."""
    empty = dict[int, Any]()
    for what, _, tensor in named_tensors(layer):
        if tensor.layout == torch.strided:
            like = _empty(tensor, device)
            is_parameter = what == "parameter"
            empty[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if is_parameter else like
    return empty


def _empty(like: Tensor, device: str) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)


class _EmptyCopies(TorchFunctionMode):
    """Copies tensors without their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), _empty(tensor, "cpu"))
        return func(*args, **(kwargs or {}))
