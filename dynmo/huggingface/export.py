"""The folder of a transformers model while it is written.

model-00001-of-00002.safetensors      the layers of one shard
model-00002-of-00002.safetensors      the last one has what the model leaves unused, too
model.safetensors.index.json          tensor -> file
config.json, generation_config.json, files of the tokenizer
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from dynmo.errors import ConfigError
from dynmo.files import write_whole
from dynmo.huggingface.folder import PartialFolder, write_companions
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.huggingface.private import as_in_files
from dynmo.runtime.state.exact_state import shapes_of_state
from dynmo.runtime.state.tensor_file import TensorFile

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# transformers finds a model by this file, so it comes last.
_CONFIG = "config.json"


def type_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the type of floating-point tensors in files that a user names."""
    names = {str(each).removeprefix("torch."): each for each in _FLOATS}
    found = names.get(dtype) if isinstance(dtype, str) else dtype
    if dtype is not None and found not in _FLOATS:
        raise ConfigError(f"dtype = {dtype!r}; known are {', '.join(names)}")
    return found


def in_files(
    model: HuggingFaceModel, state: Mapping[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Returns the state of a layer under the names, and in the shapes, that it has in files.

    A weight that two layers share is in the files once. transformers stacks the experts of a layer
    in memory, and has them one by one in files.

    Args:
        model: The model, whose folder may name another class than the one that trains.
        state: Tensors by their names in the model, on the meta device or not.
        dtype: Type of floating-point tensors in files. What the model keeps in float32 stays so, as
            in transformers. None means float32.
    """
    types, left_out = model.types(dtype or torch.float32), _left_out(model)
    state = _stacked(model, state)
    kept = {
        model.folder_class.names(name): tensor.to(types.get(name, tensor.dtype))
        for name, tensor in state.items()
        if name not in left_out
    }
    return as_in_files(model.folder_class.model, kept)


def _stacked(model: HuggingFaceModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Puts experts together that a case has taken apart. Their names end with a number."""
    whole, apart = dict[str, Tensor](), dict[str, dict[int, Tensor]]()
    known = model.structure.model.state_dict()
    for name, tensor in state.items():
        stem, _, number = name.rpartition(".")
        if number.isdecimal() and stem in known:
            apart.setdefault(stem, {})[int(number)] = tensor
        else:
            whole[name] = tensor
    return whole | {
        stem: torch.stack([each[at] for at in sorted(each)]) for stem, each in apart.items()
    }


def _left_out(model: HuggingFaceModel) -> set[str]:
    ignored: Collection[str] | None = getattr(
        model.structure.model, "_keys_to_ignore_on_save", None
    )
    return {name for _, (_, name) in model.tied} | {*(ignored or ())}


class Export:
    """Writes a model of transformers into a folder.

    Args:
        folder: The folder. Other files that it has stay there.
        modules: All layers. They may be on the meta device.
        shards: The layers of each file of weights.
        dtype: Type of floating-point weights in the files. None keeps what they have.

    Attributes:
        place: The folder until it is complete.
        files: Names of the files of weights.
        bytes: Bytes of all weights.
    """

    def __init__(
        self,
        folder: Path,
        model: HuggingFaceModel,
        modules: Sequence[nn.Module],
        shards: Sequence[Sequence[int]],
        dtype: torch.dtype | None,
    ) -> None:
        self.place, self._model, self._modules = PartialFolder(folder), model, modules
        self._shards, self._dtype, count = shards, dtype, len(shards)
        self.files = [
            "model.safetensors" if count == 1 else f"model-{at:05}-of-{count:05}.safetensors"
            for at in range(1, count + 1)
        ]
        self._shapes = [self.in_files(at, shapes_of_state(each)) for at, each in enumerate(modules)]
        self._beside = self._unused({name for shapes in self._shapes for name in shapes})
        shapes = [*self._shapes, self._beside]
        self.bytes = sum(each.nbytes for named in shapes for each in named.values())

    def in_files(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of a layer's state that are written."""
        del index
        return in_files(self._model, state, self._dtype)

    def _unused(self, names: set[str]) -> dict[str, Tensor]:
        """Returns the tensors of the model's folder that it does not use, on the meta device."""
        weights = self._model.weights
        return {
            key: torch.empty(each.shape, dtype=each.dtype, device="meta")
            for key, each in ({} if weights is None else weights.beside).items()
            if key not in names
        }

    def shard(self, number: int) -> TensorFile:
        """Begins the file of a shard. The last one gets the tensors beside the model now."""
        file = TensorFile(self.place.path / self.files[number], self._shapes_of(number))
        weights = self._model.weights
        if weights is not None and number == len(self._shards) - 1:
            try:
                for key, tensor in weights.read_beside(self._beside):
                    file.write({key: tensor})
            except BaseException as error:
                file.__exit__(type(error))
                raise
        return file

    def tensors(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of a layer for its shard, on the CPU."""
        return self.in_files(index, {name: each.detach().cpu() for name, each in state.items()})

    def complete(self) -> None:
        """Writes the other files and puts all into place. One rank calls it, after the others."""
        if len(self._shards) > 1:
            write_whole(self.place.path / _INDEX, self._index())
        every = [each.dtype for shapes in self._shapes for each in shapes.values()]
        # The type that transformers calls that of the model.
        first = next((each for each in every if each.is_floating_point), torch.float32)
        write_companions(self._model, self._dtype or first, self.place.path)
        self.place.complete(_CONFIG, _WEIGHTS)

    def _shapes_of(self, number: int) -> dict[str, Tensor]:
        shapes = dict[str, Tensor](self._beside if number == len(self._shards) - 1 else {})
        for index in self._shards[number]:
            shapes |= self._shapes[index]
        return shapes

    def _index(self) -> str:
        weights = {
            name: file for number, file in enumerate(self.files) for name in self._shapes_of(number)
        }
        counted = sum(each.numel() for each in self._beside.values())
        for module in self._modules:
            named = {name for name, _ in module.named_parameters()} - _left_out(self._model)
            shapes = shapes_of_state(module)
            counted += sum(shapes[name].numel() for name in named & shapes.keys())
        metadata = {"total_parameters": counted, "total_size": self.bytes}
        index = {"metadata": metadata, "weight_map": weights}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"
