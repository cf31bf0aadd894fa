"""A process outside of a running training: it asks to join, and waits for rank 0's grant."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dynmo.elastic.join_requests import Newcomer, join_request_text
from dynmo.elastic.launch_folder import launch_folder
from dynmo.elastic.member import describe, own_member
from dynmo.errors import InputError, RankDied, RunError, WaitTimeout
from dynmo.models.identity import Identity
from dynmo.runtime.comm.store import find_missing, open_rendezvous, read_rendezvous
from dynmo.runtime.comm.world import World

_logger = logging.getLogger(__name__)


class RunGone(InputError):
    """No run answers at the rendezvous."""


def outside_world(file: Path, *, device: torch.device, timeout: float, staged: bool) -> World:
    """Makes the world of a process that will join a running training.

    Args:
        file: The file that rank 0 of the training has written.
        device: Device of this process.
        timeout: Limit of each wait, in seconds.
        staged: Whether the training's messages pass through host memory.

    Raises:
        ConfigError: The file is damaged.
        RunGone: The training is not there any more.
    """
    record = read_rendezvous(file)
    try:
        store = open_rendezvous(record, timeout)
    except RunError as error:
        raise RunGone(f"{file}: {error}") from None
    home = dist.PrefixStore("gen/0", store)
    if find_missing(home, ["here/0"]):
        raise RunGone(f"{file}: no run meets where it says")
    return World.outside(home, device=device, timeout=timeout, staged=staged)


def join(
    world: World, identity: Identity, take_up: Callable[[str], None], stopping: Callable[[], bool]
) -> bool:
    """Waits until rank 0 lets this process join, and joins.

    Args:
        world: This process alone.
        identity: What decides the numbers here. A process that differs is refused.
        take_up: Takes rank 0's grant, and meets the other ranks.
        stopping: Whether this process shall end.

    Returns:
        False if the training is over, or this process shall end.

    Raises:
        ConfigError: Rank 0 has refused this process.
    """
    assert world.home is not None, "ranks of a program's own process groups stay"
    member = own_member(-1)
    text = join_request_text(member, identity)
    newcomer = Newcomer(world.home, text, world.timeout, describe(member))
    while True:
        grant = newcomer.wait(stopping)
        if grant is None:
            return False
        try:
            take_up(grant)
        except (WaitTimeout, RankDied) as error:
            # The others go on without this process, and may call it again.
            _logger.warning(f"{error}; waiting again")
            world.leave()
            continue
        if member.process is not None and (launcher := launch_folder()) is not None:
            launcher.become_member(member.process, world.generation)
        return True
