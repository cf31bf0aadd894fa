"""Runs one process of a run from start to end. Its rank may leave and come back."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from dynmo.config import Config
from dynmo.elastic.managers import parks
from dynmo.errors import RunError
from dynmo.files import write_whole
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.runtime.comm.store import rendezvous_record
from dynmo.train.joining import RENDEZVOUS_FILE, come_back
from dynmo.train.run_log import Listener
from dynmo.train.setup import start
from dynmo.train.trainer import RunResult, Trainer


def run(
    config: Config,
    rendezvous: Rendezvous,
    folder: Path | None,
    resume: bool,
    listen: Listener | None = None,
) -> RunResult:
    """Trains as one rank of the world at `rendezvous`.

    Args:
        rendezvous: Where the ranks meet.
        folder: `runs/NAME`, where rank 0 writes. None means that nothing is written.
        resume: Whether to go on from the newest checkpoint.
        listen: Called with every event while this process is rank 0.
    """
    with start(config, rendezvous) as (world, model):
        trainer = Trainer(config, world, model, folder, resume, listen)
        file = _tell_newcomers(rendezvous, folder) if world.rank == 0 else None
        try:
            result = trainer.run()
            if result.left and parks(config.elastic):
                return come_back(trainer) or result
            return result
        finally:
            if file is not None and not trainer.pipeline.left:
                file.unlink(missing_ok=True)


def _tell_newcomers(rendezvous: Rendezvous, folder: Path | None) -> Path | None:
    """Writes the file by which `dynmo train --join` finds the run."""
    if folder is None:
        return None
    try:
        record = rendezvous_record(rendezvous)
    except RunError:  # a world of one process, which nobody can reach
        return None
    path = folder / RENDEZVOUS_FILE
    with contextlib.suppress(OSError):  # on a full disk nobody can join, and the run trains
        write_whole(path, json.dumps(record), mode=0o600)
    return path
