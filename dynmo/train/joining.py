"""A process that joins a running run, or that comes back to it after it has left."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dynmo.config import load
from dynmo.elastic.managers import parks
from dynmo.elastic.newcomer import outside_world
from dynmo.errors import ConfigError
from dynmo.train.run_log import Listener
from dynmo.train.setup import device_for, model_of
from dynmo.train.stop_flag import stop_flag
from dynmo.train.trainer import RunResult, Trainer

# File in the folder of a running run. It says where the ranks meet.
RENDEZVOUS_FILE = "rendezvous.json"


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
    world = outside_world(
        rendezvous_file,
        device=device,
        timeout=config.parallel.timeout,
        staged=config.parallel.staged,
    )
    try:
        return come_back(Trainer(config, world, model_of(config), folder, listen=listen))
    finally:
        world.close()


def come_back(trainer: Trainer) -> RunResult | None:
    """Waits until a process that is no rank of its run is called, and trains.

    Ranks that leave the run then end, or wait to be called back.
    """
    result: RunResult | None = None
    while result is None or (result.left and parks(trainer.config.elastic)):
        # Nothing is lost if a signal ends a process that waits.
        with stop_flag() as stopping:
            if not trainer.join(stopping):
                return result
        result = trainer.run()
    return result
