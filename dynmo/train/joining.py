"""A process that joins a running run, or that comes back to it after it has left."""

from __future__ import annotations

import gc
import logging
import os
from pathlib import Path

import torch
import torch.distributed as dist

from dynmo.config import Config, load
from dynmo.elastic.join_requests import Newcomer, join_request_text
from dynmo.elastic.launcher.launch_folder import launch_folder
from dynmo.elastic.managers.choose import parks
from dynmo.elastic.member import describe, own_member
from dynmo.errors import ConfigError, InputError, RankDied, RunError, WaitTimeout
from dynmo.models.identity import Identity, identity_of
from dynmo.models.model import Model
from dynmo.runtime.comm.store import find_missing, open_rendezvous, read_rendezvous
from dynmo.runtime.comm.world import World
from dynmo.train.setup import cases_of, device_for, model_of
from dynmo.train.stop_flag import stop_flag
from dynmo.train.trainer import RunResult, Trainer

_logger = logging.getLogger(__name__)

# File in the folder of a running run. It says where the ranks meet.
RENDEZVOUS_FILE = "rendezvous.json"


class RunGone(InputError):
    """No run answers at the rendezvous."""


def join_run(folder: Path) -> int:
    """Waits until a running run needs this process, and trains until the run's end.

    Args:
        folder: `runs/NAME`, which the ranks of the run share.

    Returns:
        The exit status: 0, or 130 if the run was interrupted.

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
    record = read_rendezvous(rendezvous_file)
    config = load(config_file)
    torch.set_num_threads(config.parallel.threads)
    device = device_for(config, int(os.environ.get("LOCAL_RANK", "0")))
    model = model_of(config)
    identity = newcomer_identity(config, model)
    try:
        store = open_rendezvous(record, config.parallel.timeout)
    except RunError as error:
        raise RunGone(f"{rendezvous_file}: {error}") from None
    home = dist.PrefixStore("gen/0", store)
    if find_missing(home, ["here/0"]):
        raise RunGone(f"{rendezvous_file}: no run meets where it says")
    world = World.outside(
        home, device=device, timeout=config.parallel.timeout, staged=config.parallel.staged
    )
    try:
        result = _wait_and_train(config, world, model, identity, folder)
        while result is not None and result.left and parks(config.elastic):
            result = _wait_and_train(config, world, model, identity, folder)
    finally:
        world.close()
    return 130 if result is not None and result.interrupted else 0


def newcomer_identity(config: Config, model: Model) -> Identity:
    """Returns what decides the numbers in a process that has made no layer yet."""
    return identity_of(model, model.build(())).with_code(cases_of(config, model.layers))


def come_back(
    config: Config,
    world: World,
    model: Model,
    identity: Identity,
    folder: Path | None,
    result: RunResult,
) -> RunResult:
    """Waits until this rank is called back, after it has left the run.

    Args:
        config: Config of the run.
        world: This process alone.
        model: The model that the run trains.
        identity: What decides the model's numbers.
        folder: `runs/NAME`.
        result: Result of this process as a rank so far.

    Returns:
        The result at the end of the run.
    """
    while result.left:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
        later = _wait_and_train(config, world, model, identity, folder)
        if later is None:
            return result
        result = later
    return result


def _wait_and_train(
    config: Config,
    world: World,
    model: Model,
    identity: Identity,
    folder: Path | None,
) -> RunResult | None:
    """Returns None if the run ended without this process."""
    assert world.home is not None
    member = own_member(-1)
    text, limit = join_request_text(member, identity), config.parallel.timeout
    newcomer = Newcomer(world.home, text, limit, describe(member))
    while True:
        # Nothing is lost if a signal ends a process that waits.
        with stop_flag() as stopping:
            text = newcomer.wait(stopping)
        if text is None:
            return None
        try:
            trainer = Trainer(config, world, model, folder, invitation=text)
        except (WaitTimeout, RankDied) as error:
            # The others go on without this process, and may call it again.
            _logger.warning(f"{error}; waiting again")
            world.leave()
            continue
        if member.process is not None and (launcher := launch_folder()) is not None:
            launcher.become_member(member.process, world.generation)
        return trainer.run()
