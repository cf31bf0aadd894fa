"""Saves a pipeline: when that is due, and behind training. All ranks decide alike.

due?      The flags of a step carry rank 0's clock and the signals of all ranks.
begin     The layers are copied to memory. A process beside each rank writes them.
complete  The flags say that every rank's part is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path
from typing import Any
from weakref import WeakMethod

import torch

from dynmo.activity import ACTIVITY
from dynmo.events import CheckpointEvent, FaultEvent, SavesEvent
from dynmo.pipeline.options import Checkpoints
from dynmo.runtime.comm.agreement import NotWritten
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.state.save import Save
from dynmo.signals import Asked, signals_heard

# Bits of a step's flag: this rank wants to save, and its part of a checkpoint is being written.
SAVE, WRITING = 4, 8
# Seconds between two checkpoints of `every = "auto"`.
EVERY = 600.0


class AutoSave:
    """The checkpoints of a pipeline.

    Args:
        options: Where and how often it saves by itself. None if it does not.
        save: Copies the layers. It is a method of what owns this object.
        tell: Hands events to the listener.

    Attributes:
        step: Steps of the newest checkpoint.
    """

    def __init__(
        self,
        options: Checkpoints | None,
        world: Meeting,
        save: Callable[..., Save],
        tell: Callable[..., None],
    ) -> None:
        self._options = options if options is not None and options.every else None
        self._world, self._save, self._tell = world, WeakMethod(save), tell
        self.step = 0
        self._under_way: Save | None = None
        self._is_written = False  # on all ranks
        self._is_asked = self._stops = False
        self._stopped_at = -1  # step of the checkpoint that a stop has saved
        self._extra: Mapping[str, Any] | None = None  # what that one has of the loop
        self._begun = time.monotonic()
        self._signals = ExitStack()
        self._asked: Asked | None = None
        self._saves = 0  # SIGUSR1 that are heard
        self._is_lost = False  # a checkpoint that was asked for, by a fault
        self._saves_in = -1  # the step in which the last of them was

    # -- when --------------------------------------------------------------------------------------

    def watch(self, step: int) -> None:
        """Takes signals from now on, since there is something to save."""
        if self._asked is not None or self._options is None:
            return
        self._asked, self._saves = self._signals.enter_context(signals_heard()), 0
        every, keep = self._options.every, self._options.keep
        often = f"{EVERY / 60:.0f} minutes" if every == "auto" else f"{every} steps"
        text = (
            f"saves to {self._options.folder} every {often}, at the end, and at SIGTERM, SIGUSR1 "
            f"and Ctrl-C; keeps the newest {keep}"
        )
        self._tell(SavesEvent(step, text))

    def close(self) -> None:
        """Leaves signals to others again."""
        self._signals.close()
        self._asked = None

    @property
    def stop(self) -> bool:
        """Whether a signal has asked this rank to stop."""
        return self._asked is not None and self._asked.stops > 0

    def flag(self, step: int) -> int:
        """Returns this rank's part of the flag of a step. A step that has failed comes again."""
        writes = self._under_way is not None and not self._under_way.is_written
        asks = False
        if self._asked is not None:
            asks = self._asked.saves > self._saves or step == self._saves_in
            self._saves, self._saves_in = self._asked.saves, step if asks else -1
        asks |= self._is_lost
        if self._options is not None and self._options.every == "auto" and not self._world.rank:
            asks |= time.monotonic() - self._begun >= EVERY
        return SAVE * asks + WRITING * writes

    def observe(self, flags: Sequence[int], stop: bool) -> None:
        """Takes the flags of a step's result, and whether it ends the training."""
        self._is_written = self._under_way is not None and not any(f & WRITING for f in flags)
        self._is_asked |= any(flag & SAVE for flag in flags)
        self._stops |= stop

    def after_step(self, step: int) -> None:
        """Completes what is written. Saves at once if training stops."""
        if self._is_written:
            self.complete()
        if self._stops and self.if_due(step):
            self._stopped_at = step

    def if_due(self, step: int, *, at_end: bool = False) -> bool:
        """Saves if that is due now that so many steps are done. Returns whether it was."""
        options = self._options
        again = at_end and step == self._stopped_at
        if options is None or (step == self.step and not again):
            return False
        every, waits = options.every, at_end or self._stops
        if not (waits or self._is_asked or (every != "auto" and step % every == 0)):
            return False
        extra = None if options.extra is None else options.extra()
        if again and not self._has_gone_on(extra):
            return False
        self.begin(Path(options.folder), options.keep, extra, behind=not waits)
        if waits:
            self._extra = deepcopy(extra)
            self.complete(raises=True)
        return True

    def _has_gone_on(self, extra: Mapping[str, Any] | None) -> bool:
        """Returns whether the loop of rank 0 has changed its extra since a stop has saved it."""
        changed = self._world.rank == 0 and extra != self._extra
        return bool(self._world.largest(torch.tensor([changed * 1]), "the end of the training"))

    # -- how ---------------------------------------------------------------------------------------

    def begin(
        self,
        folder: Path,
        keep: int,
        extra: Mapping[str, Any] | None,
        best: int | None = None,
        *,
        behind: bool,
    ) -> Path:
        """Begins a checkpoint, after the last one is complete. Returns its folder."""
        self.complete()
        begin = self._save()
        assert begin is not None
        with ACTIVITY.doing("saves a checkpoint"):
            save = begin(folder, keep, extra, best, behind=behind)
        self._under_way, self._is_written = save, False
        self._is_asked, self._stops, self._stopped_at = False, False, -1
        self._is_lost = False
        self.step, self._begun = save.step, time.monotonic()
        return save.path

    def drop(self) -> None:
        """Gives up the checkpoint that is being written, after a fault. One is saved soon."""
        self._is_lost |= self._is_asked or self._under_way is not None
        self._under_way, self._is_written = None, False
        self._is_asked, self._stops, self._stopped_at = False, False, -1

    def complete(self, *, raises: bool = False) -> None:
        """Waits for the checkpoint that is being written, if there is one."""
        save, self._under_way, self._is_written = self._under_way, None, False
        if save is None:
            return
        step = save.step - 1
        try:
            with ACTIVITY.doing("completes a checkpoint"):
                saved = save.complete()
        except NotWritten as error:
            if raises:
                raise
            self._tell(FaultEvent(step, f"{error}; the run goes on"))
            return
        path = str(saved.path)
        self._tell(CheckpointEvent(step, path, saved.bytes, saved.seconds, waited=saved.waited))
