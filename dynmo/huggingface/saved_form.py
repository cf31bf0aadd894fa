"""A layer's state under the names, and in the shapes, that transformers gives it in files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.huggingface.transformers_private import as_in_files
from dynmo.runtime.state.exact_state import shapes_of_state

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SavedForm:
    """Turns the state of layers into the tensors of files.

    A weight that two layers share is in the files once. transformers stacks the experts of a layer
    in memory, and has them one by one in files.

    Args:
        dtype: Type of floating-point tensors in files. What the model keeps in float32 stays so, as
            in transformers. None means float32.
    """

    def __init__(self, model: HuggingFaceModel, dtype: torch.dtype | None) -> None:
        self._class = model.folder_class
        self._types = model.types.at(dtype or torch.float32)
        users = {name for _, (_, name) in model.tied}
        ignored: Collection[str] = (
            getattr(model.structure.model, "_keys_to_ignore_on_save", None) or ()
        )
        self._left_out = users | {*ignored}

    def tensors(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of a layer by their names in files, on the device of the state."""
        kept = {
            self._class.names(name): tensor.to(self._types.get(name, tensor.dtype))
            for name, tensor in state.items()
            if name not in self._left_out
        }
        return as_in_files(self._class.model, kept)

    def parameters(self, module: nn.Module) -> int:
        """Returns the number of parameters of a layer. A shared weight counts where it is saved."""
        named = dict(module.named_parameters())
        shapes = shapes_of_state(module)
        return sum(t.numel() for n, t in shapes.items() if n in named and n not in self._left_out)

    def shapes(self, module: nn.Module) -> dict[str, Tensor]:
        """Returns what `tensors` returns for a layer, on the meta device."""
        return self.tensors(shapes_of_state(module))


def type_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the type of floating-point tensors in files that a user names."""
    names = {str(each).removeprefix("torch."): each for each in FLOATS}
    found = names.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in FLOATS:
        raise ConfigError(f"dtype = {dtype!r}; known are {', '.join(names)}")
    return found


def first_float(shapes: Iterable[Tensor]) -> torch.dtype:
    """Returns the type that transformers calls that of the model."""
    return next((each.dtype for each in shapes if each.is_floating_point()), torch.float32)
