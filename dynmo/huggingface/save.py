"""Saves the model of a pipeline as transformers does."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from dynmo.counterparts import names_checked
from dynmo.errors import ConfigError
from dynmo.huggingface.export import Export, type_of
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.models.model import Model
from dynmo.pipeline.pipeline import Pipeline
from dynmo.runtime.comm.agreement import Attempt
from dynmo.runtime.state.exact_state import exact_state, masters_of
from dynmo.runtime.state.layer_store import LayerStore


@names_checked
def save_pretrained(
    pipeline: Pipeline,
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    merge: bool = False,
) -> None:
    """Saves the model of a pipeline in a folder that transformers loads.

    If the model has adapters, only these are saved, in a folder that peft loads, and the tokenizer.

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
            cannot be merged, `folder` is that of the weights under the adapters, or experts are
            spread over replicas.
        RunError: A rank could not write its part. Every rank raises it, and the files of the folder
            are as before.
    """
    model = transformers_model(pipeline.mesh.model, "save_pretrained")
    kind = type_of(dtype)
    store = pipeline.mesh.store
    world = store.world
    if store.spread.placements:
        raise ConfigError(
            "no rank has all experts of a layer; save a checkpoint, resume it with "
            "parallel.expert = 1, and export it then"
        )
    if world.replicas > 1:
        # Raises if replicas differ: the first replica's weights are saved for all.
        pipeline.digest()
    layers = range(model.layers)
    shards = [
        [at for at in layers if store.layout.rank_of(at) == rank] for rank in range(world.size)
    ]
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
            masters = masters_of(store, index)
            with store.whole(index) as module, attempt.part():
                if file is not None:
                    file.write(export.tensors(index, exact_state(module, masters)))
        with attempt.part():
            stack.close()


def export_of(model: HuggingFaceModel, merge: bool, folder: Path) -> type[Export]:
    """Returns what writes a model: the adapters alone, if it has some and they are not merged."""
    if merge and model.lora is None:
        raise ConfigError("merge: the model has no adapters; leave it out")
    if model.lora is None:
        return Export
    if model.folder is not None and folder.resolve() == model.folder.resolve():
        harm = "be lost" if merge else "no longer load without adapters"
        raise ConfigError(
            f"{folder} has the weights that the adapters were trained on, which would {harm}; "
            "give another folder"
        )
    from dynmo.huggingface.adapters import AdapterExport, MergedExport  # needs peft

    return MergedExport if merge else AdapterExport


def transformers_model(model: Model, what: str) -> HuggingFaceModel:
    """Returns a model as one of transformers, or raises ConfigError."""
    if not isinstance(model, HuggingFaceModel):
        raise ConfigError(
            f"dynmo.huggingface.{what}: the pipeline's model is not one of transformers; make it "
            "with dynmo.huggingface.from_pretrained, or save pipeline.state_dict()"
        )
    return model
