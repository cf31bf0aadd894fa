"""Saves a checkpoint: at once, or behind training. `checkpoint.py` says what it has.

take       copies the layers to memory, or writes them
complete   once all ranks have written: the manifest, the name, `latest`
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynmo.errors import CheckpointError, RankDied, RunError
from dynmo.files import sync_folder, write_whole
from dynmo.runtime.comm.agreement import Attempt, NotWritten
from dynmo.runtime.comm.rank_group import RankGroup
from dynmo.runtime.comm.store import ENDED, find_present
from dynmo.runtime.state.background import MemoryFiles
from dynmo.runtime.state.checkpoint import (
    BEST,
    MANIFEST,
    TENSORS,
    VERSION,
    CheckpointManifest,
    best_of,
    files_of,
    folder_of,
    named,
    sealed,
    sha256_of,
    step_of,
    tensor_name,
)
from dynmo.runtime.state.layer_tensors import base_of, contents, describe
from dynmo.runtime.state.tensor_file import TensorFile

_logger = logging.getLogger(__name__)


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
        # A rank that was stopped, and goes on after the others have met anew, disturbs no new one.
        generation = world.everyone.generation
        self._partial = self.path.with_suffix(f".g{generation}.tmp" if generation else ".tmp")
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
            if self._failure is None:
                _check_is_shared(self._partial)
                self._memory = MemoryFiles() if behind else None
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
        folder, memory = self._partial / folder_of(index), self._memory
        described, values = folder / "layer.json", folder / TENSORS
        self._layers.append(index)
        if memory is None:
            folder.mkdir()
            write_whole(described, text)
            with TensorFile(values, tensors) as file:
                file.write(tensors)
            sync_folder(folder)
            self._bytes += described.stat().st_size + values.stat().st_size
            self._digests += sha256_of(described), sha256_of(values)
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
            RankDied: The other ranks went on without this one.
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
        if world.rank == 0 and find_present(world.everyone.store, [ENDED]):
            raise RankDied(f"{self.path} got no name: the other ranks went on without this one")
        with self._attempt.part():
            if world.rank == 0:
                hashes = (row.numpy().tobytes().hex() for row in table.flatten(0, 1))
                files = dict(zip(files_of(len(self._names)), hashes, strict=True))
                manifest = CheckpointManifest(
                    version=VERSION,
                    step=step,
                    layers=list(self._names),
                    files=files,
                    state=self._state,
                )
                _complete(self._partial, self.path, manifest)
                if self._best is not None:
                    write_whole(self._folder / BEST, f"step-{self._best:06d}")
        self._attempt.agree("the checkpoint to be complete")
        if world.rank == 0:
            _remove_old(self._folder, step, self._keep)
        now = time.perf_counter()
        return Saved(self.path, int(size), now - self._start, self._waited + now - begin)


def _check_is_shared(partial: Path) -> None:
    """Raises RunError if this rank does not see the folder that rank 0 has made."""
    # A listing is up to date on a network file system, where a look at one name may be old.
    if not partial.parent.is_dir() or partial not in partial.parent.iterdir():
        raise RunError(
            f"{partial} of rank 0 is not on this machine; give a folder that all machines share"
        )


def _complete(partial: Path, final: Path, manifest: CheckpointManifest) -> None:
    """Writes the manifest and gives a checkpoint its name. Then `latest` names it."""
    write_whole(partial / MANIFEST, sealed(manifest))
    sync_folder(partial)
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
    sync_folder(final.parent)


def _remove_old(folder: Path, step: int, keep: int) -> None:
    """Keeps the best one and the last `keep` checkpoints up to `step`. Newer ones were damaged."""
    complete = [path for path in named(folder) if (path / MANIFEST).is_file()]
    kept = [path for path in complete if step_of(path) <= step][:keep]
    with suppress(CheckpointError):  # there is none
        kept.append(best_of(folder))
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


def _content(
    index: int, module: nn.Module, optimizer_state: dict[str, Tensor]
) -> tuple[str, dict[str, Tensor]]:
    """Returns the description and the tensors of a layer's files."""
    every, base = contents(module, optimizer_state).items(), base_of(module)
    left_out = {("parameter", name) for name in base.hashes} if base is not None else set()
    tensors = {key: t.detach() for key, t in every if key[0] != "gradient" and key not in left_out}
    manifest = describe(index, module, tensors).model_copy(update={"base": base})
    return manifest.model_dump_json(), {tensor_name(*key): t for key, t in tensors.items()}
