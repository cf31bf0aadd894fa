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

from dynmo.files import write_whole
from dynmo.huggingface.companions import write_companions
from dynmo.huggingface.partial_folder import PartialFolder
from dynmo.huggingface.saved_form import SavedForm, first_float
from dynmo.huggingface.tensor_file import TensorFile
from dynmo.models.huggingface.model import HuggingFaceModel

_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# transformers finds a model by this file, so it comes last.
_CONFIG = "config.json"


class Export:
    """Writes a model of transformers into a folder.

    Args:
        folder: The folder. Other files that it has stay there.
        modules: All layers. They may be on the meta device.
        shards: The layers of each file of weights.
        dtype: Type of floating-point weights in the files. None keeps what they have.

    Attributes:
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
        self._place, self._model, self._modules = PartialFolder(folder), model, modules
        self._form, self._shards = SavedForm(model, dtype), shards
        count = len(shards)
        self.files = [
            "model.safetensors" if count == 1 else f"model-{at:05}-of-{count:05}.safetensors"
            for at in range(1, count + 1)
        ]
        self._shapes = [self._form.shapes(module) for module in modules]
        every = {name: each for shapes in self._shapes for name, each in shapes.items()}
        self._beside = beside(model, every)
        self.bytes = sum(each.nbytes for each in (*every.values(), *self._beside.values()))
        self._dtype = first_float(every.values()) if dtype is None else dtype

    @property
    def partial(self) -> Path:
        """The folder until it is complete."""
        return self._place.path

    def prepare(self) -> None:
        """Makes the partial folder. One rank calls it, before the others write."""
        self._place.prepare()

    def shard(self, number: int) -> TensorFile:
        """Begins the file of a shard. The last one gets the tensors beside the model now."""
        file = TensorFile(self.partial / self.files[number], self._shapes_of(number))
        weights = self._model.weights
        if weights is not None and self._is_last(number):
            for key, tensor in weights.read_beside(self._beside):
                file.write({key: tensor})
        return file

    def tensors(self, index: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tensors of a layer for its shard, on the CPU."""
        del index
        return self._form.tensors({name: each.detach().cpu() for name, each in state.items()})

    def complete(self) -> None:
        """Writes the other files and puts all into place. One rank calls it, after the others."""
        if len(self._shards) > 1:
            write_whole(self.partial / _INDEX, self._index())
        write_companions(self._model, self._dtype, self.partial)
        self._place.complete(_CONFIG, _WEIGHTS)

    def _is_last(self, number: int) -> bool:
        return number == len(self._shards) - 1

    def _shapes_of(self, number: int) -> dict[str, Tensor]:
        shapes = {
            name: each
            for index in self._shards[number]
            for name, each in self._shapes[index].items()
        }
        return shapes | self._beside if self._is_last(number) else shapes

    def _index(self) -> str:
        weights = {
            name: file for number, file in enumerate(self.files) for name in self._shapes_of(number)
        }
        parameters = sum(self._form.parameters(module) for module in self._modules)
        parameters += sum(each.numel() for each in self._beside.values())
        metadata = {"total_parameters": parameters, "total_size": self.bytes}
        index = {"metadata": metadata, "weight_map": weights}
        return json.dumps(index, indent=2, sort_keys=True) + "\n"


def beside(model: HuggingFaceModel, names: Collection[str]) -> dict[str, Tensor]:
    """Returns the tensors of the model's folder that it does not use, on the meta device.

    Args:
        names: Names in files of the model's own tensors.
    """
    return {
        key: torch.empty(each.shape, dtype=each.dtype, device="meta")
        for key, each in (model.weights.beside if model.weights is not None else {}).items()
        if key not in names
    }
