"""Saves the model of a pipeline as transformers does.

model-00001-of-00002.safetensors      the layers of one shard
model-00002-of-00002.safetensors      the last one has what the model leaves unused, too
model.safetensors.index.json          tensor -> file
config.json, generation_config.json, files of the tokenizer
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor, nn

from dynmo.counterparts import names_checked
from dynmo.errors import ConfigError
from dynmo.files import write_whole
from dynmo.huggingface.folder import PartialFolder, TensorFile, write_companions
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.huggingface.private import as_in_files
from dynmo.models.model import Model
from dynmo.pipeline.pipeline import Pipeline
from dynmo.runtime.comm.agreement import Attempt
from dynmo.runtime.state.exact_state import exact_state, shapes_of_state
from dynmo.runtime.state.layer_store import LayerStore

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_INDEX = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
# transformers finds a model by this file, so it comes last.
_CONFIG = "config.json"


@names_checked
def save_pretrained(
    pipeline: Pipeline,
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    merge: bool = False,
) -> None:
    """Saves the model of a pipeline in a folder that transformers loads.

    If the model has adapters, only these are saved, in a folder that peft loads.

    All ranks call it together, and share the file system. Each rank of the pipeline writes its
    layers into a file of its own, one layer at a time. The folder gets the configs too, and the
    tokenizer of the folder that the model was loaded from.

    Args:
        pipeline: The pipeline. Its model is one of `from_pretrained`.
        folder: The folder, new or not. Other files that it has stay there.
        dtype: Type of the weights in the files, such as "bfloat16". None writes float32: the
            masters, if the pipeline computes in lower precision.
        merge: Whether adapters become a part of the weights, which are read from their folder
            again. The folder then loads without peft.

    Raises:
        ConfigError: The model is not one of transformers, there is no such type, the adapters
            cannot be merged, or a merged model would replace the weights that it comes from.
        RunError: A rank could not write its part. Every rank raises it, and the files of the folder
            are as before.
    """
    engine = pipeline._engine
    model = transformers_model(pipeline.mesh.model, "save_pretrained")
    kind = type_of(dtype)
    store = engine.pending.final
    world = store.world
    if world.replicas > 1:
        # Raises if replicas differ: the first replica's weights are saved for all.
        pipeline.digest()
    layers = range(model.layers)
    shards = [[at for at in layers if store.rank_of(at) == rank] for rank in range(world.size)]
    folder = Path(folder)
    export = export_of(model, merge, folder)(folder, model, store.modules, shards, kind)
    attempt = Attempt(world, export.place.path, f"the files of {folder} are as before")
    with attempt.part():
        if world.everyone.rank == 0:
            export.place.prepare()
    attempt.agree("the folder of the model")
    _write_layers(store, export, attempt, shards[world.rank])
    attempt.agree("the layers of the model to be written")
    with attempt.part():
        if world.everyone.rank == 0:
            export.complete()
    attempt.agree("the folder of the model to be complete")


def _write_layers(
    store: LayerStore, export: Export, attempt: Attempt, layers: Sequence[int]
) -> None:
    """Writes own layers. The ranks of the first replica write for all."""
    with ExitStack() as stack:
        file = None
        with attempt.part():
            if store.world.replica == 0:
                file = stack.enter_context(export.shard(store.world.rank))
        # The loop runs to the end, whatever fails: with ZeRO-1 replicas gather masters together.
        for index in layers:
            masters = store.masters(index)
            with store.whole(index) as module, attempt.part():
                if file is not None:
                    file.write(export.tensors(index, exact_state(module, masters)))
        with attempt.part():
            stack.close()


def export_of(model: HuggingFaceModel, merge: bool, folder: Path) -> type[Export]:
    """Returns what writes a model: the adapters alone, if it has some and they are not merged."""
    if merge and model.lora is None:
        raise ConfigError("merge: the model has no adapters; leave it out")
    if merge and model.folder is not None and folder.resolve() == model.folder.resolve():
        raise ConfigError(
            f"{folder} has the weights that the adapters were trained on, which would be lost; "
            "give another folder"
        )
    if merge:
        from dynmo.huggingface.adapters import MergedExport  # needs peft

        return MergedExport
    if model.lora is None:
        return Export
    from dynmo.huggingface.adapters import AdapterExport  # needs peft

    return AdapterExport


def transformers_model(model: Model, what: str) -> HuggingFaceModel:
    """Returns a model as one of transformers, or raises ConfigError."""
    if not isinstance(model, HuggingFaceModel):
        raise ConfigError(
            f"dynmo.huggingface.{what}: the pipeline's model is not one of transformers; make it "
            "with dynmo.huggingface.from_pretrained, or save pipeline.state_dict()"
        )
    return model


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
    kept = {
        model.folder_class.names(name): tensor.to(types.get(name, tensor.dtype))
        for name, tensor in state.items()
        if name not in left_out
    }
    return as_in_files(model.folder_class.model, kept)


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
            for key, tensor in weights.read_beside(self._beside):
                file.write({key: tensor})
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
