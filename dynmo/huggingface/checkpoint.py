"""Makes a folder of transformers of a checkpoint, in one process and layer by layer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from dynmo.errors import CheckpointError, RunError
from dynmo.huggingface.export import Export, in_files
from dynmo.huggingface.save import export_of
from dynmo.models.huggingface.model import HuggingFaceModel
from dynmo.runtime.comm.headers import DTYPES
from dynmo.runtime.state import checkpoint
from dynmo.runtime.state.checkpoint import MANIFEST, CheckpointManifest
from dynmo.runtime.state.exact_state import exact_state, shapes_of_state
from dynmo.runtime.state.layer_tensors import Contents, fill, fit

# Most bytes of a file of weights, as in transformers.
_MOST = 50 * 10**9
_MASTER = "/master"
_TENSORS = ("parameter", "buffer")


def export_checkpoint(
    path: Path,
    model: HuggingFaceModel,
    folder: Path,
    dtype: torch.dtype | None = None,
    listen: Callable[[int], None] = lambda _: None,
    *,
    merge: bool = False,
) -> Export:
    """Writes the model of a verified checkpoint as `save_pretrained` does.

    Args:
        path: The checkpoint, whose layers are those of `model`.
        dtype: Type of floating-point weights in the files. None writes float32.
        listen: Called with the number of layers that are done.
        merge: Whether adapters become a part of the weights.

    Returns:
        What was written: names of the files of weights, and their bytes.

    Raises:
        CheckpointError: The checkpoint is of another model.
        ConfigError: `folder` is that of the weights under the adapters.
        InputError: `folder` is a file.
        RunError: The folder cannot be written. Its files are as before.
    """
    modules = model.build(())
    for index, module in enumerate(modules):
        _take_types(module, path, index)
    shapes = [in_files(model, shapes_of_state(module), dtype) for module in modules]
    sizes = [sum(each.nbytes for each in named.values()) for named in shapes]
    if model.weights is not None:
        sizes[-1] += sum(each.bytes for each in model.weights.beside.values())
    shards = in_shards(sizes, _MOST)
    export = export_of(model, merge, folder)(folder, model, modules, shards, dtype)
    try:
        export.place.prepare()
        for number, layers in enumerate(shards):
            with export.shard(number) as file:
                for index in layers:
                    file.write(export.tensors(index, _state(path, model, index, modules[index])))
                    modules[index].to("meta")
                    listen(index + 1)
        export.complete()
    except OSError as error:
        raise RunError(
            f"{folder} could not be written ({error.strerror or error}); its files are as before"
        ) from error
    finally:
        shutil.rmtree(export.place.path, ignore_errors=True)
    return export


def in_shards(sizes: Iterable[int], most: int) -> list[list[int]]:
    """Returns the layers of each shard: consecutive ones, of `most` bytes or a single layer."""
    shards, room = [list[int]()], most
    for index, size in enumerate(sizes):
        if size > room and shards[-1]:
            shards.append([])
            room = most
        shards[-1].append(index)
        room -= size
    return shards


def _take_types(module: nn.Module, path: Path, index: int) -> None:
    """Gives the tensors of a layer on the meta device their types in the checkpoint."""
    records = checkpoint.load_manifest(path, index).tensors
    types = {each.name: DTYPES.get(each.dtype) for each in records if each.section in _TENSORS}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        tensor.data = tensor.data.to(types.get(name) or tensor.dtype)


def _state(path: Path, model: HuggingFaceModel, index: int, module: nn.Module) -> dict[str, Tensor]:
    """Returns the state of a layer in a checkpoint."""
    manifest = checkpoint.load_manifest(path, index)
    tensors: Contents = checkpoint.load_layer(path, manifest, torch.device("cpu"))
    if model.lora is not None:
        return _adapters(tensors, model.saved)
    tensors = fit(index, model.names[index], module, tensors, manifest.forms)
    flags = dict.fromkeys((name for name, _ in module.named_parameters()), False)
    optimizer = fill(module, tensors, flags)
    masters = {
        name: optimizer[f"{name}{_MASTER}"] for name in flags if f"{name}{_MASTER}" in optimizer
    }
    return exact_state(module, masters)


def _adapters(tensors: Contents, saved: Collection[str]) -> dict[str, Tensor]:
    """Returns what is saved of a layer. A checkpoint may lack the weights beside it."""
    found = {
        name: tensors.get(("optimizer", f"{name}{_MASTER}"), tensor)
        for (section, name), tensor in tensors.items()
        if section in ("parameter", "buffer") and name in saved
    }
    return {name: x.float() if x.is_floating_point() else x for name, x in found.items()}


def find_checkpoint(folder: Path) -> tuple[Path, CheckpointManifest, list[str]]:
    """Returns the newest whole checkpoint of a folder, or the folder itself if it is one.

    Every file is read, and its hash compared.

    Returns:
        The checkpoint, its manifest, and problems of newer ones.

    Raises:
        CheckpointError: There is none.
    """
    if (folder / MANIFEST).exists():
        return folder, checkpoint.verify(folder), []
    if not any(folder.glob("step-*")):
        raise CheckpointError(
            f"{folder} has no checkpoint; give a run (runs/NAME), its folder of checkpoints, or "
            "one of them (step-N)"
        )
    return checkpoint.find(folder)
