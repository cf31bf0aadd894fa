"""Checkpoints: safetensors, and dynmo's own manifest.

Each global layer has a folder. No pickles are written or read.

    checkpoints/latest                the name of the newest complete checkpoint
    checkpoints/best                  the name of one that stays, if the run has told it
    checkpoints/step-000120/
        manifest.json                 step, layer names, state, SHA-256 of every file and of itself
        layer-0007/                   layer.json (names, dtypes, shapes) and tensors.safetensors

A save goes to `step-N.tmp`, or to `step-N.gG.tmp` in generation G of the ranks. It is hashed and
synced, then renamed. Only then does `latest` move. A load verifies every hash, with some layers for
each rank. It falls back one checkpoint if the newest is damaged. Layers are keyed by global index,
so any placement can load any checkpoint. The ranks share the file system.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from dynmo.errors import CheckpointError
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.state.layer_tensors import Contents, Manifest

_logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
BEST = "best"
VERSION = 2

_SEALED = re.compile(rb'(.*),\n "sha256": "([0-9a-f]{64})"\n\}', re.DOTALL)


class CheckpointManifest(BaseModel):
    """Description of a checkpoint: SHA-256 of each file, and the run's own part."""

    # JSON has no infinity, but the state of a user's scheduler may. Python reads it back.
    model_config = ConfigDict(ser_json_inf_nan="constants")
    version: int
    step: int
    layers: list[str]
    files: dict[str, str]
    state: dict[str, Any]
    sha256: str | None = None


def sealed(manifest: CheckpointManifest) -> str:
    """Returns the text of a manifest, with its own SHA-256 at the end."""
    body = manifest.model_dump_json(indent=1, exclude={"sha256"}).removesuffix("\n}")
    digest = hashlib.sha256(body.encode()).hexdigest()
    return f'{body},\n "sha256": "{digest}"\n}}'


def read(checkpoint: Path) -> CheckpointManifest:
    """Reads the manifest in the folder `checkpoint`, and checks its own hash."""
    path = checkpoint / MANIFEST
    text = _content_of(path)
    seal = _SEALED.fullmatch(text)
    if seal is None and b'"version": 1,' in text:
        raise CheckpointError(f"{path} is of an earlier version of dynmo, which alone reads it")
    if seal is None or hashlib.sha256(seal[1]).hexdigest().encode() != seal[2]:
        raise CheckpointError(
            f"{path} is damaged, or of an earlier version: its SHA-256 is not the one at its end"
        )
    fields = json.loads(text)
    if fields["version"] != VERSION:
        raise CheckpointError(
            f"{checkpoint} has version {fields['version']}; this dynmo reads version {VERSION}"
        )
    return CheckpointManifest(**fields)


def _content_of(path: Path) -> bytes:
    """Reads a file, or raises CheckpointError."""
    if path.exists() and not path.is_file():  # a pipe, say, would be waited for
        raise CheckpointError(f"{path} cannot be read: it is not a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None


def best_of(folder: Path) -> Path:
    """Returns the checkpoint that a run has called its best, or raises CheckpointError."""
    try:
        return folder / (folder / BEST).read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise CheckpointError(
            f"{folder} has no best checkpoint; a run has one with checkpoint.keep_best"
        ) from None


TENSORS = "tensors.safetensors"


def folder_of(index: int) -> str:
    return f"layer-{index:04d}"


def files_of(layers: int) -> list[str]:
    """Returns every file of a checkpoint of `layers` layers, except for the manifest."""
    return [f"{folder_of(i)}/{name}" for i in range(layers) for name in ("layer.json", TENSORS)]


def tensor_name(section: str, name: str) -> str:
    return f"{section}:{name}"


def complete(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, newest first, or the folder itself if it is one."""
    return [folder] if (folder / MANIFEST).exists() else named(folder)


def named(folder: Path) -> list[Path]:
    """Returns complete checkpoints, newest first: one gets its name last."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find(
    folder: Path, world: RankGroup | None = None
) -> tuple[Path, CheckpointManifest, list[str]]:
    """Returns the newest whole checkpoint, its manifest, and problems of newer ones.

    Each rank of `world` reads a part.

    Raises:
        CheckpointError: There is none.
    """
    problems: list[str] = []
    for path in named(folder):
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
    if not os.path.lexists(path):
        return []
    try:
        name = _content_of(path).decode(errors="replace").strip()
    except CheckpointError as error:
        return [str(error)]
    if any(path.name == name for path in named(folder)):
        return []
    return [f"{path} names {name!r}, which is missing"]


def verify(path: Path, world: RankGroup | None = None) -> CheckpointManifest:
    """Checks every file of a checkpoint against its manifest, and that itself."""
    manifest = read(path)
    if path.name != f"step-{manifest.step:06d}":
        raise CheckpointError(f"{path} has the manifest of step {manifest.step}")
    files = [path / name for name in manifest.files]
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
        return file.is_file() and sha256_of(file).hex() == digest
    except OSError:  # that it cannot be read
        return False


def load_manifest(path: Path, index: int) -> Manifest:
    """Reads the description of one layer of a checkpoint, or raises CheckpointError."""
    file = path / folder_of(index) / "layer.json"
    try:
        return Manifest.model_validate_json(_content_of(file))
    except ValidationError:
        raise CheckpointError(f"{file} is of another version of dynmo") from None


def load_layer(path: Path, manifest: Manifest, device: torch.device) -> Contents:
    """Reads the layer of a manifest from a verified checkpoint, or raises CheckpointError."""
    folder = path / folder_of(manifest.layer)
    try:
        with safe_open(folder / TENSORS, framework="pt") as file:
            # The file is mapped into memory, and the layer outlives it.
            return {
                (r.section, r.name): file.get_tensor(tensor_name(r.section, r.name)).to(
                    device, copy=True
                )
                for r in manifest.tensors
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}/{TENSORS} cannot be read: {error}") from None


def sha256_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
