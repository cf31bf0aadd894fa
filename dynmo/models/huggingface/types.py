"""The types that transformers gives the tensors of a model in each precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from dynmo.kernels.torch_private import unset_fake_temporarily
from dynmo.models.huggingface.transformers_private import types_after_loading


class Types:
    """The type of each parameter and buffer after `from_pretrained(dtype=...)` of transformers.

    Most have the type that is asked for. Some models keep others in float32.

    Args:
        model: The model on the meta device, whose tied weights count.
        make: Makes the model in a type, on the meta device.
    """

    def __init__(
        self, model: PreTrainedModel, make: Callable[[torch.dtype], PreTrainedModel]
    ) -> None:
        self._model, self._make = model, make
        self._known = dict[torch.dtype, Mapping[str, torch.dtype]]()

    def at(self, dtype: torch.dtype) -> Mapping[str, torch.dtype]:
        """Returns the types by the names of the model without adapters."""
        if dtype not in self._known:
            tied: Mapping[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
            with unset_fake_temporarily():
                self._known[dtype] = types_after_loading(self._make(dtype), dtype, tied)
        return self._known[dtype]


def cast_buffers(module: nn.Module, types: Mapping[str, torch.dtype], path: str = "") -> None:
    """Gives the buffers of a module their types.

    Args:
        path: Path of the module in the model.
    """
    for name, buffer in module.named_buffers(path):
        buffer.data = buffer.data.to(types.get(name, buffer.dtype))
