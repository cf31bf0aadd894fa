"""Checkpoints: safetensors, and dynmo's own manifest.

Each global layer has a folder. No pickles are written or read.

    checkpoints/latest                the name of the newest complete checkpoint
    checkpoints/step-000120/
        manifest.json                 step, layer names, state, SHA-256 of every file
        layer-0007/                   layer.json (names, dtypes, shapes) and tensors.safetensors

A save goes to `step-N.tmp`, is hashed and synced, then renamed. Only then does `latest` move. A
load verifies every hash, with some layers for each rank. It falls back one checkpoint if the newest
is damaged. Layers are keyed by global index, so any placement can load any checkpoint. The ranks
share the file system.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from dynmo.errors import CheckpointError
from dynmo.files import write_whole
from dynmo.kernels.packed_weight import conform, unknown_form
from dynmo.runtime.comm.agreement import Attempt
from dynmo.runtime.comm.headers import DTYPES
from dynmo.runtime.comm.world import World
from dynmo.runtime.state.base_weights import base_of
from dynmo.runtime.state.checkpoint_manifest import (
    MANIFEST,
    VERSION,
    CheckpointManifest,
    read,
    sealed,
    unread,
)
from dynmo.runtime.state.migration import Contents, Manifest, contents, describe

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    path: Path
    bytes: int
    seconds: float


def save(
    world: World,
    folder: Path,
    step: int,
    names: Sequence[str],
    layers: Iterable[tuple[int, tuple[nn.Module, dict[str, Tensor]]]],
    state: dict[str, Any],
    keep: int,
    best: int | None = None,
) -> Saved:
    """Saves a checkpoint after `step` steps. All ranks call it together.

    Args:
        world: The ranks that share `folder`.
        names: Names of the model's layers, in order.
        layers: Layers that this rank writes: global index and (module, optimizer state).
        state: The run's own part, as JSON. The same on every rank.
        keep: Number of checkpoints that stay, this one included.
        best: Step of a checkpoint that stays beside them.

    Raises:
        RunError: Some rank could not write its part. Every rank raises it, and the checkpoints
            that were there before are untouched.
    """
    start = time.perf_counter()
    final = folder / f"step-{step:06d}"
    partial = final.with_suffix(".tmp")
    attempt = Attempt(world, partial, "earlier checkpoints are untouched")
    with attempt.part():
        if world.rank == 0:
            _remove(partial)
            partial.mkdir(parents=True)
    attempt.agree("the checkpoint's folder")
    table = torch.zeros(len(names), 2, 32, dtype=torch.uint8)
    size = torch.zeros(1, dtype=torch.float64)
    # The loop runs to the end, whatever fails: with ZeRO-1 the replicas gather states together.
    for index, (module, optimizer_state) in layers:
        with attempt.part():
            paths = _save_layer(partial / _folder(index), index, module, optimizer_state)
            for which, path in enumerate(paths):
                table[index, which] = torch.frombuffer(bytearray(_sha256(path)), dtype=torch.uint8)
                size += path.stat().st_size
    attempt.agree("the checkpoint's layers to be written")
    world.sum(table, "the checkpoint's layers to be written")
    world.sum(size, "the checkpoint's layers to be written")
    with attempt.part():
        if world.rank == 0:
            hashes = (row.numpy().tobytes().hex() for row in table.flatten(0, 1))
            files = dict(zip(_files(len(names)), hashes, strict=True))
            manifest = CheckpointManifest(
                version=VERSION, step=step, layers=list(names), files=files, state=state
            )
            _complete(partial, final, manifest)
    attempt.agree("the checkpoint to be complete")
    if world.rank == 0:
        _remove_old(folder, step, keep, best)
    return Saved(final, int(size), time.perf_counter() - start)


def _complete(partial: Path, final: Path, manifest: CheckpointManifest) -> None:
    """Writes the manifest and gives a checkpoint its name. Then `latest` names it."""
    write_whole(partial / MANIFEST, sealed(manifest))
    _sync(partial)
    _put_in_place(partial, final)
    latest = final.parent / "latest"
    if latest.is_dir() and not latest.is_symlink():
        latest.rmdir()  # a file cannot replace it
    write_whole(latest, final.name)


def _put_in_place(partial: Path, final: Path) -> None:
    """Renames a complete checkpoint. Another one of the same step is removed only now."""
    replaced = final.with_suffix(".replaced.tmp")
    if final.exists():
        _remove(replaced)
        final.rename(replaced)
    partial.rename(final)
    _sync(final.parent)


def _remove_old(folder: Path, step: int, keep: int, best: int | None) -> None:
    """Keeps `best` and the last `keep` checkpoints up to `step`. Newer ones were damaged."""
    complete = [path for path in _named(folder) if (path / MANIFEST).is_file()]
    kept = [path for path in complete if _step(path) <= step][:keep]
    kept += [path for path in complete if _step(path) == best]
    for old in [*(path for path in complete if path not in kept), *folder.glob("step-*.tmp")]:
        try:
            _remove(old)
        except OSError as error:
            _logger.warning(f"{old} cannot be removed: {error.strerror}")


def _remove(path: Path) -> None:
    """Removes a folder with its content, or a file, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_TENSORS = "tensors.safetensors"


def _folder(index: int) -> str:
    return f"layer-{index:04d}"


def _files(layers: int) -> list[str]:
    """Returns every file of a checkpoint of `layers` layers, except for the manifest."""
    return [f"{_folder(i)}/{name}" for i in range(layers) for name in ("layer.json", _TENSORS)]


def _save_layer(
    folder: Path, index: int, module: nn.Module, optimizer_state: dict[str, Tensor]
) -> tuple[Path, Path]:
    every, base = contents(module, optimizer_state).items(), base_of(module)
    left_out = {("parameter", name) for name in base.hashes} if base is not None else set()
    tensors = {
        key: t.detach().cpu() for key, t in every if key[0] != "gradient" and key not in left_out
    }
    folder.mkdir()
    manifest = describe(index, module, tensors).model_copy(update={"base": base})
    write_whole(folder / "layer.json", manifest.text())
    # Tensors over one memory block, and a view of a larger one, would count as shared.
    uses = Counter(t.untyped_storage()._cdata for t in tensors.values())
    whole = {
        _name(*key): t.clone()
        if uses[t.untyped_storage()._cdata] > 1 or t.nbytes < t.untyped_storage().nbytes()
        else t
        for key, t in tensors.items()
    }
    with (folder / _TENSORS).open("wb") as file:
        file.write(save_safetensors(whole))
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    return folder / "layer.json", folder / _TENSORS


def _name(section: str, name: str) -> str:
    return f"{section}:{name}"


def _named(folder: Path) -> list[Path]:
    """Returns complete checkpoints, newest first: one gets its name last."""
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find(folder: Path, world: World | None = None) -> tuple[Path, CheckpointManifest, list[str]]:
    """Returns the newest whole checkpoint, its manifest, and problems of newer ones.

    Each rank of `world` reads a part.

    Raises:
        CheckpointError: There is none.
    """
    problems: list[str] = []
    for path in _named(folder):
        try:
            return path, verify(path, world), [*problems, *_missing_latest(folder)]
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{folder}: no checkpoint is whole; the newest: {problems[0]}")
    raise CheckpointError(
        f"{folder}: there is no checkpoint to resume from (a run starts anew with --overwrite)"
    )


def _missing_latest(folder: Path) -> list[str]:
    """Returns a line if `latest` names a checkpoint that is not there."""
    path = folder / "latest"
    if path.exists() and not path.is_file():
        return [f"{path} cannot be read: it is not a file"]
    try:
        name = path.read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{path} cannot be read: {error.strerror}"]
    if any(path.name == name for path in _named(folder)):
        return []
    return [f"{path} names {name!r}, which is missing"]


def verify(path: Path, world: World | None = None) -> CheckpointManifest:
    """Checks every file of a checkpoint against its manifest, and that itself."""
    manifest = read(path)
    if path.name != f"step-{manifest.step:06d}":
        raise CheckpointError(f"{path} has the manifest of step {manifest.step}")
    names = _files(len(manifest.layers))
    if list(manifest.files) != names:
        odd = next(iter({*names} ^ {*manifest.files}), "another order")
        why = f"its files are not those of its layers ({odd})"
        raise CheckpointError(f"{path}/{MANIFEST} is damaged: {why}")
    files = [path / name for name in names]
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    mine = set(list(dict.fromkeys(file.parent for file in files))[rank::ranks])
    hashes = zip(files, manifest.files.values(), strict=True)
    whole = (file.parent not in mine or _is_whole(file, digest) for file, digest in hashes)
    good = next((at for at, fine in enumerate(whole) if not fine), len(files))
    if world is not None:
        first = torch.tensor([-good])
        good = -int(world.largest(first, "its part of the checkpoint to be read"))
    if good < len(files):
        damaged = "is damaged or cannot be read: its SHA-256 is not the manifest's"
        raise CheckpointError(f"{files[good]} {damaged if files[good].is_file() else 'is missing'}")
    return manifest


def _is_whole(file: Path, digest: str) -> bool:
    try:
        return file.is_file() and _sha256(file).hex() == digest
    except OSError:  # that it cannot be read
        return False


def load_manifest(path: Path, index: int) -> Manifest:
    """Reads the description of one layer of a checkpoint, or raises CheckpointError."""
    file = path / _folder(index) / "layer.json"
    try:
        return Manifest.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{file} {unread(error)}") from None


def load_layer(path: Path, index: int, device: torch.device) -> Contents:
    """Reads one layer of a verified checkpoint, or raises CheckpointError."""
    folder, manifest = path / _folder(index), load_manifest(path, index)
    try:
        dtypes = [DTYPES[record.dtype] for record in manifest.tensors]
    except KeyError as error:
        raise CheckpointError(f"{folder}/layer.json {unread(error)}") from None
    tensors: Contents = {}
    try:
        with safe_open(folder / _TENSORS, framework="pt") as file:
            for record, dtype in zip(manifest.tensors, dtypes, strict=True):
                tensor = file.get_tensor(_name(record.section, record.name))
                if (list(tensor.shape), tensor.dtype) != (record.shape, dtype):
                    raise CheckpointError(
                        f"{folder}/{_TENSORS} is damaged: {record.section} {record.name} has "
                        "another shape or dtype than in layer.json"
                    )
                # The file is mapped into memory, and the layer outlives it.
                tensors[record.section, record.name] = tensor.to(device, copy=True)
    except (OSError, SafetensorError) as error:
        why = error.strerror if isinstance(error, OSError) else None
        told = f"cannot be read: {why}" if why else "is damaged: it lacks a tensor of layer.json"
        raise CheckpointError(f"{folder}/{_TENSORS} {told}") from None
    return tensors


def fit(
    index: int,
    name: str,
    module: nn.Module,
    tensors: Contents,
    forms: Mapping[str, str] | None = None,
) -> Contents:
    """Gives a layer's module the form that it has in a checkpoint.

    Args:
        forms: Forms of its packed weights. Earlier versions of dynmo saved none.

    Returns:
        The tensors that the module shall take. A buffer that the module makes for itself (not
        `persistent`) is among them only if it has the same shape.

    Raises:
        CheckpointError: The layer has another shape or dtype, or its form is not known here.
    """
    layer = f"layer {index} ({name})"
    if (form := unknown_form(forms or {})) is not None:
        raise CheckpointError(
            f"{layer} has weights that are packed as {form}, which is not imported here; name its "
            "case in dynamism.cases, or import it before the checkpoint is read"
        )
    buffers = {key: t for (section, key), t in tensors.items() if section == "buffer"}
    try:
        conform(module, buffers, forms)
    except ValueError as error:
        raise CheckpointError(f"{layer}: {error}; resume with the run's own config") from None
    _check_shapes(layer, module, tensors)
    left_out = _remade_buffers(layer, module, tensors)
    _check_dtypes(layer, module, tensors)
    return {key: tensor for key, tensor in tensors.items() if key not in left_out}


def _check_shapes(layer: str, module: nn.Module, tensors: Contents) -> None:
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters()}
    saved = {key: tuple(t.shape) for (section, key), t in tensors.items() if section == "parameter"}
    for key in sorted({*shapes, *saved}):
        if shapes.get(key) != saved.get(key):
            raise CheckpointError(
                f"{layer}: {key} is {saved.get(key)} in the checkpoint, {shapes.get(key)} in the "
                "config's model; resume with the config that the run was started with"
            )


def _remade_buffers(layer: str, module: nn.Module, tensors: Contents) -> set[tuple[str, str]]:
    """Returns saved buffers that the module has made for itself, in another shape.

    Raises CheckpointError if any other buffer is only here or only in the checkpoint.
    """
    remade = {
        f"{prefix}.{key}".lstrip(".")
        for prefix, part in module.named_modules()
        for key in part._non_persistent_buffers_set
    }
    # A forward may make a buffer, but no module for it.
    parts = dict(module.named_modules())
    lost = sorted(
        key
        for section, key in tensors
        if section == "buffer" and key.rpartition(".")[0] not in parts
    )
    if lost:
        raise CheckpointError(
            f"{layer}: the checkpoint has the buffer {lost[0]}, the config's model has not; "
            "resume with the config that the run was started with"
        )
    left_out: set[tuple[str, str]] = set()
    for key, buffer in module.named_buffers():
        then = tensors.get(("buffer", key))
        if then is None and key not in remade:
            raise CheckpointError(
                f"{layer}: the config's model has the buffer {key}, the checkpoint has not; "
                "resume with the config that the run was started with"
            )
        if then is not None and key in remade and then.shape != buffer.shape:
            left_out.add(("buffer", key))
    return left_out


def _check_dtypes(layer: str, module: nn.Module, tensors: Contents) -> None:
    for key, parameter in module.named_parameters():
        then = tensors["parameter", key].dtype
        if then != parameter.dtype:
            was, now = (str(x).removeprefix("torch.") for x in (then, parameter.dtype))
            raise CheckpointError(
                f"{layer}: {key} is {was} in the checkpoint, {now} in the config's model; resume "
                "with the train.precision that the run was started with"
            )


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
