"""Checkpoints: safetensors, and dynmo's own manifest.

Each global layer has a folder. No pickles are written or read.

    checkpoints/latest                the name of the newest complete checkpoint
    checkpoints/best                  the name of one that stays, if the run has told it
    checkpoints/step-000120/
        manifest.json                 step, layer names, state, SHA-256 of every file and of itself
        layer-0007/                   layer.json (names, dtypes, shapes) and tensors.safetensors

A save goes to `step-N.tmp`, is hashed and synced, then renamed. Only then does `latest` move. A
load verifies every hash, with some layers for each rank. It falls back one checkpoint if the newest
is damaged. Layers are keyed by global index, so any placement can load any checkpoint. The ranks
share the file system.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from dynmo.errors import CheckpointError
from dynmo.files import write_whole
from dynmo.runtime.comm.agreement import Attempt, NotWritten
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.state.background import MemoryFiles
from dynmo.runtime.state.layer_tensors import Contents, Manifest, base_of, contents, describe
from dynmo.runtime.state.tensor_file import TensorFile

_logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
_BEST = "best"
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


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is complete.

    Attributes:
        seconds: From the begin of the save on.
        waited: Part of them for which training stood still.
    """

    path: Path
    bytes: int
    seconds: float
    waited: float


def save(
    world: RankGroup,
    folder: Path,
    step: int,
    names: Sequence[str],
    layers: Iterable[tuple[int, tuple[nn.Module, dict[str, Tensor]]]],
    state: dict[str, Any],
    keep: int,
    best: int | None = None,
) -> Saved:
    """Saves a checkpoint, and waits until it is complete. See `Save`."""
    under_way = Save(world, folder, step, names, state, keep, best)
    under_way.take(layers)
    return under_way.complete()


class Save:
    """A checkpoint after `step` steps, which is being saved. All ranks make one together.

    Args:
        world: The ranks that share `folder`.
        names: Names of the model's layers, in order.
        state: The run's own part, as JSON. The same on every rank.
        keep: Number of checkpoints that stay, this one included.
        best: Step of a checkpoint that stays beside them.
        behind: Whether a process beside each rank writes, while training goes on.
    """

    def __init__(
        self,
        world: RankGroup,
        folder: Path,
        step: int,
        names: Sequence[str],
        state: dict[str, Any],
        keep: int,
        best: int | None = None,
        *,
        behind: bool = False,
    ) -> None:
        self._start = time.perf_counter()
        self._world, self._folder, self.step = world, folder, step
        self._names = names
        self._keep, self._best = keep, best
        self.path = folder / f"step-{step:06d}"
        self._partial = self.path.with_suffix(".tmp")
        self._attempt = Attempt(world, self._partial, "earlier checkpoints are untouched")
        self._memory: MemoryFiles | None = None
        self._failure: NotWritten | None = None  # `complete` raises it
        with self._attempt.part():
            self._state = deepcopy(state)  # what it refers to may change before it is written
            if world.rank == 0:
                _remove(self._partial)
                self._partial.mkdir(parents=True)
        try:
            self._attempt.agree("the checkpoint's folder")
        except NotWritten as error:
            self._failure = error
        with self._attempt.part():
            if behind and self._failure is None:
                self._memory = MemoryFiles()
        self._layers: list[int] = []
        self._digests: list[bytes] = []
        self._bytes = 0

    def take(self, layers: Iterable[tuple[int, tuple[nn.Module, dict[str, Tensor]]]]) -> None:
        """Takes what this rank writes: global index and (module, optimizer state).

        The layers may change once this returns.
        """
        # The loop runs to the end, whatever fails: with ZeRO-1 the replicas gather states together.
        for index, (module, optimizer_state) in () if self._failure else layers:
            with self._attempt.part():
                self._add(index, module, optimizer_state)
        with self._attempt.part():
            if self._memory is not None and self._failure is None:
                self._memory.send()
        self._waited = time.perf_counter() - self._start

    def _add(self, index: int, module: nn.Module, optimizer_state: dict[str, Tensor]) -> None:
        """Writes a layer, or copies it to memory."""
        text, tensors = _content(index, module, optimizer_state)
        folder, memory = self._partial / _folder(index), self._memory
        described, values = folder / "layer.json", folder / _TENSORS
        self._layers.append(index)
        if memory is None:
            folder.mkdir()
            write_whole(described, text)
            with TensorFile(values, tensors) as file:
                file.write(tensors)
            _sync(folder)
            self._bytes += described.stat().st_size + values.stat().st_size
            self._digests += _sha256(described), _sha256(values)
        else:
            memory.memory.write(text.encode())
            memory.end_file(described)
            with TensorFile(memory.memory, tensors) as file:
                file.write(tensors)
            memory.end_file(values)
            self._bytes = memory.bytes

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is there, or has failed."""
        return self._memory is None or self._memory.are_written

    def complete(self) -> Saved:
        """Waits for the files, and gives the checkpoint its name. All ranks call it together.

        Raises:
            NotWritten: Some rank could not write its part. Every rank raises it, and earlier
                checkpoints are untouched.
        """
        begin, world, step = time.perf_counter(), self._world, self.step
        if self._failure is not None:
            raise self._failure
        with self._attempt.part():
            if self._memory is not None:
                self._digests = self._memory.digests()
        self._attempt.agree("the checkpoint's layers to be written")
        table = torch.zeros(len(self._names), 2, 32, dtype=torch.uint8)
        for at, digest in enumerate(self._digests):
            table[self._layers[at // 2], at % 2] = torch.frombuffer(
                bytearray(digest), dtype=torch.uint8
            )
        size = torch.tensor([float(self._bytes)], dtype=torch.float64)
        world.sum(table, "the checkpoint's layers to be written")
        world.sum(size, "the checkpoint's layers to be written")
        with self._attempt.part():
            if world.rank == 0:
                hashes = (row.numpy().tobytes().hex() for row in table.flatten(0, 1))
                files = dict(zip(_files(len(self._names)), hashes, strict=True))
                manifest = CheckpointManifest(
                    version=VERSION,
                    step=step,
                    layers=list(self._names),
                    files=files,
                    state=self._state,
                )
                _complete(self._partial, self.path, manifest)
                if self._best is not None:
                    write_whole(self._folder / _BEST, f"step-{self._best:06d}")
        self._attempt.agree("the checkpoint to be complete")
        if world.rank == 0:
            _remove_old(self._folder, step, self._keep)
        now = time.perf_counter()
        return Saved(self.path, int(size), now - self._start, self._waited + now - begin)


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


def _remove_old(folder: Path, step: int, keep: int) -> None:
    """Keeps the best one and the last `keep` checkpoints up to `step`. Newer ones were damaged."""
    complete = [path for path in _named(folder) if (path / MANIFEST).is_file()]
    kept = [path for path in complete if _step(path) <= step][:keep]
    with suppress(CheckpointError):  # there is none
        kept.append(best_of(folder))
    for old in [*(path for path in complete if path not in kept), *folder.glob("step-*.tmp")]:
        try:
            _remove(old)
        except OSError as error:
            _logger.warning(f"{old} cannot be removed: {error.strerror}")


def best_of(folder: Path) -> Path:
    """Returns the checkpoint that a run has called its best, or raises CheckpointError."""
    try:
        return folder / (folder / _BEST).read_text(encoding="utf-8", errors="replace")
    except OSError:
        raise CheckpointError(
            f"{folder} has no best checkpoint; a run has one with checkpoint.keep_best"
        ) from None


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


def _content(
    index: int, module: nn.Module, optimizer_state: dict[str, Tensor]
) -> tuple[str, dict[str, Tensor]]:
    """Returns the description and the tensors of a layer's files."""
    every, base = contents(module, optimizer_state).items(), base_of(module)
    left_out = {("parameter", name) for name in base.hashes} if base is not None else set()
    tensors = {key: t.detach() for key, t in every if key[0] != "gradient" and key not in left_out}
    manifest = describe(index, module, tensors).model_copy(update={"base": base})
    return manifest.model_dump_json(), {_name(*key): t for key, t in tensors.items()}


def _name(section: str, name: str) -> str:
    return f"{section}:{name}"


def complete(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, newest first, or the folder itself if it is one."""
    return [folder] if (folder / MANIFEST).exists() else _named(folder)


def _named(folder: Path) -> list[Path]:
    """Returns complete checkpoints, newest first: one gets its name last."""
    named = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(named, key=_step, reverse=True)


def _step(path: Path) -> int:
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
    if not os.path.lexists(path):
        return []
    try:
        name = _content_of(path).decode(errors="replace").strip()
    except CheckpointError as error:
        return [str(error)]
    if any(path.name == name for path in _named(folder)):
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
        return file.is_file() and _sha256(file).hex() == digest
    except OSError:  # that it cannot be read
        return False


def load_manifest(path: Path, index: int) -> Manifest:
    """Reads the description of one layer of a checkpoint, or raises CheckpointError."""
    file = path / _folder(index) / "layer.json"
    try:
        return Manifest.model_validate_json(_content_of(file))
    except ValidationError:
        raise CheckpointError(f"{file} is of another version of dynmo") from None


def load_layer(path: Path, manifest: Manifest, device: torch.device) -> Contents:
    """Reads the layer of a manifest from a verified checkpoint, or raises CheckpointError."""
    folder = path / _folder(manifest.layer)
    try:
        with safe_open(folder / _TENSORS, framework="pt") as file:
            # The file is mapped into memory, and the layer outlives it.
            return {
                (r.section, r.name): file.get_tensor(_name(r.section, r.name)).to(device, copy=True)
                for r in manifest.tensors
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder}/{_TENSORS} cannot be read: {error}") from None


def _sha256(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
