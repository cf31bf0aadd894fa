"""Checkpoints: torch DCP over safetensors, a folder per global layer, and a manifest of our own. No pickles are written or read.

    checkpoints/latest                  the name of the newest complete checkpoint
    checkpoints/step-000120/manifest.json        step, model's layer names, run state, SHA-256 of every file
                            layer-0007/          layer.json (names, dtypes, shapes) and DCP's safetensors

A save goes to `step-N.tmp`, is hashed and synced, then renamed; only then does `latest` move. A load verifies every hash (each rank those
of some layers), and falls back one checkpoint if the newest is damaged. Layers are keyed by global index, so any placement can load any
checkpoint. The ranks share the file system.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import save_file
from torch import Tensor, nn

from dynmo.errors import CheckpointError
from dynmo.kernels.sparse_linear import conform
from dynmo.runtime.headers import DTYPES
from dynmo.runtime.migrate import Contents, Manifest, contents, describe
from dynmo.runtime.world import World

_VERSION = 1


class CheckpointManifest(BaseModel):
    """What a checkpoint says of itself. files: path inside the checkpoint -> SHA-256."""

    model_config = ConfigDict(extra="forbid", strict=True)
    version: int
    step: int
    layers: list[str]
    files: dict[str, str]
    state: dict[str, Any]


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
) -> Saved:
    """Saves after `step` steps. layers: those that this rank writes, as global index and (module, optimizer state); state: JSON, the
    same on every rank."""
    start = time.perf_counter()
    final = folder / f"step-{step:06d}"
    partial = final.with_suffix(".tmp")
    if world.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier("the checkpoint's folder")
    table = torch.zeros(len(names), 2, 32, dtype=torch.uint8)
    size = torch.zeros(1, dtype=torch.float64)
    for index, (module, optimizer_state) in layers:
        for which, path in enumerate(_save_layer(partial / _folder(index), index, module, optimizer_state)):
            table[index, which] = torch.frombuffer(bytearray(_sha256(path)), dtype=torch.uint8)
            size += path.stat().st_size
    world.sum(table, "the checkpoint's layers to be written")
    world.sum(size, "the checkpoint's layers to be written")
    if world.rank == 0:
        files = {
            f"{_folder(i)}/{name}": table[i, which].numpy().tobytes().hex()
            for i in range(len(names))
            for which, name in enumerate(("layer.json", _TENSORS))
        }
        manifest = CheckpointManifest(version=_VERSION, step=step, layers=list(names), files=files, state=state)
        _write(partial / "manifest.json", manifest.model_dump_json(indent=1))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync(folder)
        _write(folder / "latest.tmp", final.name)
        (folder / "latest.tmp").replace(folder / "latest")
        # What is newer than this one was damaged, or it would have been resumed from: it must not count among those to keep.
        kept = [p for p in _complete(folder) if _step(p) <= step][:keep]
        for old in [*(p for p in _complete(folder) if p not in kept), *folder.glob("step-*.tmp")]:
            shutil.rmtree(old)
    world.barrier("the checkpoint to be complete")
    return Saved(final, int(size), time.perf_counter() - start)


_TENSORS = "tensors.safetensors"


def _folder(index: int) -> str:
    return f"layer-{index:04d}"


def _save_layer(folder: Path, index: int, module: nn.Module, optimizer_state: dict[str, Tensor]) -> tuple[Path, Path]:
    tensors = {key: t.detach().cpu() for key, t in contents(module, optimizer_state).items() if key[0] != "gradient"}
    folder.mkdir()
    _write(folder / "layer.json", describe(index, module, tensors).model_dump_json())
    if tensors:
        _save_tensors(folder, tensors)
    else:  # an activation by itself, say, for which DCP writes no file
        save_file({}, folder / _TENSORS)
    with (folder / _TENSORS).open("rb") as file:
        os.fsync(file.fileno())
    return folder / "layer.json", folder / _TENSORS


def _save_tensors(folder: Path, tensors: Contents) -> None:
    import torch.distributed.checkpoint as dcp  # takes over a second, which a run shall not begin with
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with warnings.catch_warnings():
        # Each rank saves its own layers, on purpose without DCP's collectives (which pickle).
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            {_name(*key): t for key, t in tensors.items()},
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            no_dist=True,
        )
    (written,) = folder.glob("*.safetensors")
    written.rename(folder / _TENSORS)


def _name(section: str, name: str) -> str:
    return f"{section}:{name}"


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, newest first."""
    named = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and (p / "manifest.json").is_file()]
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find(folder: Path, world: World | None = None) -> tuple[Path, CheckpointManifest, list[str]]:
    """The newest checkpoint that is whole, and what was wrong with those newer than it. Raises CheckpointError when there is none.

    world: ranks that look for it together, each of which reads a part.
    """
    problems: list[str] = []
    for path in _complete(folder):
        try:
            return path, verify(path, world), problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(f"{folder}: no checkpoint is whole; the newest: {problems[0]}")
    raise CheckpointError(f"{folder}: there is no checkpoint to resume from; start anew with --overwrite")


def verify(path: Path, world: World | None = None) -> CheckpointManifest:
    """Checks every file of a checkpoint against its manifest; where ranks of a world do so together, each those of some layers.

    Raises CheckpointError naming the first that differs, on every rank.
    """
    try:
        manifest = CheckpointManifest.model_validate_json((path / "manifest.json").read_bytes())
    except (OSError, ValidationError) as error:
        raise CheckpointError(f"{path}/manifest.json {_unread(error)}") from None
    if manifest.version != _VERSION:
        raise CheckpointError(f"{path} has version {manifest.version}; this dynmo reads version {_VERSION}")
    files = [path / name for name in manifest.files]
    rank, ranks = (0, 1) if world is None else (world.rank, world.size)
    mine = set(list(dict.fromkeys(file.parent for file in files))[rank::ranks])
    whole = (file.parent not in mine or _is_whole(file, digest) for file, digest in zip(files, manifest.files.values(), strict=True))
    good = next((at for at, fine in enumerate(whole) if not fine), len(files))
    if world is not None:
        good = -int(world.largest(torch.tensor([-good]), "its part of the checkpoint to be read"))
    if good < len(files):
        said = "is damaged or cannot be read: its SHA-256 is not the manifest's" if files[good].is_file() else "is missing"
        raise CheckpointError(f"{files[good]} {said}")
    return manifest


def _unread(error: OSError | ValidationError | KeyError) -> str:
    """Why a file of JSON cannot be used, in words that follow its name."""
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror}"
    if isinstance(error, KeyError):
        return f"is damaged: it has the dtype {error}, which this dynmo does not know"
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return "is damaged: it is not valid JSON"
    field = ".".join(map(str, first["loc"]))
    said = {"missing": "is missing", "extra_forbidden": "is not one that this dynmo knows"}.get(first["type"], "has a wrong value")
    return f"is damaged: {f'its field {field} {said}' if field else 'it holds no object'}"


def _is_whole(file: Path, digest: str) -> bool:
    try:
        return file.is_file() and _sha256(file).hex() == digest
    except OSError:  # that it cannot be read
        return False


def load_layer(path: Path, index: int, device: torch.device) -> tuple[Contents, dict[str, bool]]:
    """One layer of a verified checkpoint: its tensors, and requires_grad of each parameter."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    folder = path / _folder(index)
    try:
        manifest = Manifest.model_validate_json((folder / "layer.json").read_bytes())
        tensors = {(r.section, r.name): torch.empty(r.shape, dtype=DTYPES[r.dtype]) for r in manifest.tensors}
    except (OSError, ValidationError, KeyError) as error:
        raise CheckpointError(f"{folder}/layer.json {_unread(error)}") from None
    if not tensors:
        return {}, {}
    state: dict[str, Any] = {_name(*key): t for key, t in tensors.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(state, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
        except Exception as error:
            raise CheckpointError(f"{folder}: {type(error).__name__}: {str(error).splitlines()[0]}") from None
    moved = {key: state[_name(*key)].to(device) for key in tensors}
    return moved, {r.name: r.requires_grad for r in manifest.tensors if r.section == "parameter"}


def fit(index: int, name: str, module: nn.Module, tensors: Contents) -> Contents:
    """Gives a layer's module the form that a checkpoint has of it. Returns what of the checkpoint it is to take: of buffers that it makes
    for itself (not `persistent`), those of its own shape. Raises CheckpointError if it is of another shape or dtype."""
    try:
        pruned = conform(module, {key: t for (section, key), t in tensors.items() if section == "buffer"})
    except ValueError as error:
        raise CheckpointError(f"layer {index} ({name}): {error}; resume with the run's own config") from None
    shapes = {key: tuple(p.shape) for key, p in module.named_parameters() if key not in pruned}
    saved = {key: tuple(t.shape) for (section, key), t in tensors.items() if section == "parameter" and key not in pruned}
    for key in sorted({*shapes, *saved}):
        if shapes.get(key) != saved.get(key):
            raise CheckpointError(
                f"layer {index} ({name}): {key} is {saved.get(key)} in the checkpoint, {shapes.get(key)} in the "
                "config's model; resume with the config that the run was started with"
            )
    remade = {f"{prefix}.{key}".lstrip(".") for prefix, part in module.named_modules() for key in part._non_persistent_buffers_set}
    # A forward may make a buffer, but no module for it.
    parts = dict(module.named_modules())
    lost = sorted(key for section, key in tensors if section == "buffer" and key.rpartition(".")[0] not in parts)
    if lost:
        raise CheckpointError(
            f"layer {index} ({name}): the checkpoint has the buffer {lost[0]}, the config's model has not; resume with the config that the "
            "run was started with"
        )
    left_out: set[tuple[str, str]] = set()
    for key, buffer in module.named_buffers():
        then = tensors.get(("buffer", key))
        if then is None and key not in remade:
            raise CheckpointError(
                f"layer {index} ({name}): the config's model has the buffer {key}, the checkpoint has not; resume with the config that the "
                "run was started with"
            )
        if then is not None and key in remade and then.shape != buffer.shape:
            left_out.add(("buffer", key))
    for key, parameter in module.named_parameters():
        then = tensors["parameter", key].dtype
        if then != parameter.dtype:
            was, now = (str(x).removeprefix("torch.") for x in (then, parameter.dtype))
            raise CheckpointError(
                f"layer {index} ({name}): {key} is {was} in the checkpoint, {now} in the config's model; resume "
                "with the train.precision that the run was started with"
            )
    return {key: tensor for key, tensor in tensors.items() if key not in left_out}


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
