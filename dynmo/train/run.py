"""Runs one process of a run from start to end. Its rank may leave, and join or come back."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import torch

from dynmo.config import Config, load
from dynmo.elastic.managers import parks
from dynmo.elastic.newcomer import outside_world
from dynmo.errors import ConfigError, RunError
from dynmo.files import write_whole
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.rendezvous import Rendezvous
from dynmo.runtime.comm.store import rendezvous_record
from dynmo.signals import is_asked_to_stop, signals_heard
from dynmo.train.run_log import Listener
from dynmo.train.setup import device_for, freeze_imports, model_of, start
from dynmo.train.trainer import RunResult, Trainer

# File in the folder of a running run. It says where the ranks meet.
RENDEZVOUS_FILE = "rendezvous.json"


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
        if world.rank == 0:
            _tell_newcomers(rendezvous, folder)
        trainer.on_new_folder = lambda: _tell_newcomers(rendezvous, folder)
        try:
            result = trainer.run()
            if result.left and parks(config.elastic):
                return come_back(trainer) or result
            return result
        finally:
            _end_entrance(folder, world)


def _tell_newcomers(rendezvous: Rendezvous, folder: Path | None) -> None:
    """Writes the file by which `dynmo train --join` finds the run."""
    if folder is None:
        return
    # Nobody can reach a world of one process. On a full disk nobody can join, and the run trains.
    with contextlib.suppress(RunError, OSError):
        record = rendezvous_record(rendezvous)
        write_whole(folder / RENDEZVOUS_FILE, json.dumps(record), mode=0o600)


def _end_entrance(folder: Path | None, world: Meeting) -> None:
    """Removes that file on rank 0, which may not be the one that has written it."""
    if folder is not None and world.leads:
        (folder / RENDEZVOUS_FILE).unlink(missing_ok=True)


def join_run(folder: Path, listen: Listener | None = None) -> RunResult | None:
    """Waits until a running run needs this process, and trains until the run's end.

    Args:
        folder: `runs/NAME`, which the ranks of the run share.
        listen: Called with every event while this process is rank 0.

    Returns:
        The result of the run. None if it did not need this process.

    Raises:
        ConfigError: The run is not there or does not go on at present, or the file that says where
            its ranks meet is damaged.
        RunGone: The run was killed.
        RunError: The run failed.
    """
    config_file, rendezvous_file = folder / "config.toml", folder / RENDEZVOUS_FILE
    if not config_file.is_file():
        raise ConfigError(
            f"{folder} does not exist, so there is nothing to join; start the run first, in the "
            "same folder"
        )
    if not rendezvous_file.is_file():
        raise ConfigError(
            f"{folder} is not being trained now, so there is nothing to join; start it, or go on "
            "with --resume"
        )
    config = load(config_file)
    torch.set_num_threads(config.parallel.threads)
    device = device_for(config, int(os.environ.get("LOCAL_RANK", "0")))
    freeze_imports()
    world = outside_world(
        rendezvous_file,
        device=device,
        timeout=config.parallel.timeout,
        work_timeout=config.parallel.work_timeout,
        staged=config.parallel.staged,
    )
    try:
        return come_back(Trainer(config, world, model_of(config), folder, listen=listen))
    finally:
        _end_entrance(folder, world)
        world.close()


def come_back(trainer: Trainer) -> RunResult | None:
    """Waits until a process that is no rank of its run is called, and trains.

    Ranks that leave the run then end, or wait to be called back.
    """
    result: RunResult | None = None
    while result is None or (result.left and parks(trainer.config.elastic)):
        # Nothing is lost if a signal ends a process that waits.
        with signals_heard():
            if not trainer.join(is_asked_to_stop):
                return result
        result = trainer.run()
    return result
