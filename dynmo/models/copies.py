"""Copies of layers without the values of their parameters and buffers."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dynmo.errors import ConfigError
from dynmo.models.model import named_tensors

_MOST_SHARED = 1000


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
    return _copy(layer, computed | _emptied(layer, "meta")).to("meta")


def copied(index: int, module: nn.Module) -> nn.Module:
    try:
        return without_memory(module)
    except Exception as error:
        raise ConfigError(
            f"layer {index} ({type(module).__name__}) cannot be copied "
            f"({type(error).__name__}: {error}); give Sequential functions that make the layers, "
            "such as functools.partial(Block, ...)"
        ) from error


def as_fakes(layer: nn.Module) -> nn.Module:
    """Returns a copy all of whose tensors are fake. Works in a FakeTensorMode only."""
    with _EmptyCopies():
        return _copy(layer, _emptied(layer, "cpu"))


def _copy(layer: nn.Module, known: dict[int, Any]) -> nn.Module:
    """Returns a deep copy that shares what cannot be copied, such as locks and modules of Python.

    Args:
        known: Copies of objects, by their id.
    """
    for _ in range(_MOST_SHARED):
        try:
            return copy.deepcopy(layer, dict(known))
        except (TypeError, RuntimeError) as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            stack = [f.f_locals["x"] for f in frames if f.f_code is copy.deepcopy.__code__]
            # A copy of an event would wake nobody, so it is shared with its lock.
            whole = [x for x in stack if type(x).__module__ in ("threading", "queue")]
            shared = (whole or stack[-1:] or [layer])[0]
            if shared is layer or id(shared) in known:
                raise
            known[id(shared)] = shared.detach() if isinstance(shared, Tensor) else shared
    raise TypeError(f"more than {_MOST_SHARED} of its attributes cannot be copied")


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
