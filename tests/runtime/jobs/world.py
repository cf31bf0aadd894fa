"""Jobs of the pool's ranks for the tests of the world."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import torch

from dynmo.errors import DynmoError, RankDied, WaitTimeout
from dynmo.runtime.comm import agreement
from dynmo.runtime.comm.world import World


def lose_patience(world: World) -> None:
    """Once all are here, a collective has a short limit. The job closes its world afterwards."""
    world.barrier("all to be here")
    world.timeout = 0.5
    group: Any = world.process_group or world.group
    group.set_timeout(timedelta(seconds=world.timeout))


def one_never_comes(world: World) -> list[str]:
    world.barrier("all to be here")
    world.close()
    try:
        World.join(world.store, world.rank, world.size + 1, timeout=1, generation=1)
    except WaitTimeout as error:
        return [type(error).__name__, str(error)]
    return []


def all_are_rank_0(world: World) -> str:
    """The ranks meet anew, each as rank 0 of two."""
    world.barrier("all to be here")
    world.close()
    try:
        World.join(world.store, 0, 2, timeout=1, generation=1)
    except DynmoError as error:
        return str(error)
    return ""


def after_a_failed_rendezvous(world: World) -> list[float]:
    """Rank 0 waits in vain for a group of two. Then all meet."""
    world.barrier("all to be here")
    world.close()
    if world.rank == 0:
        with contextlib.suppress(WaitTimeout):
            World.join(world.store, 0, 2, timeout=0.5, generation=1)
    rejoined = World.join(world.store, world.rank, world.size, timeout=10, generation=2)
    try:
        return rejoined.sum(torch.ones(1), "the sum").tolist()
    finally:
        rejoined.close()


def one_is_late(world: World, what: str) -> list[str]:
    """Rank 1 stays away from what rank 0 waits for."""
    caught: list[str] = []
    try:
        if what == "sum":
            lose_patience(world)
        world.barrier("all to be here")
        if what == "message":  # its limit is that with which the world was made
            world.close()
            world = World.join(world.store, world.rank, 2, timeout=1.5, generation=1)
        if world.rank == 1 and what == "gone":
            world.close()
        elif world.rank == 1:
            world.store.wait(["named"])
        elif what == "sum":
            world.sum(torch.zeros(1), "the end of the test")
        else:
            world.wait(world.receive(torch.zeros(1), 1, 0), 1, "the activation of microbatch 3")
    except (WaitTimeout, RankDied) as error:
        caught = [type(error).__name__, str(error)]
    if world.rank == 0:
        world.store.set("named", "1")
    world.close()
    return caught


def agree(world: World, said: list[list[str | None]]) -> list[str]:
    told: list[str] = []
    for each in said:
        try:
            agreement.agree(world, each[world.rank], "the plan")
            told.append("")
        except DynmoError as error:
            told.append(str(error))
    return told


def compare(world: World, lists: list[list[str]]) -> list[tuple[int, list[int]] | None]:
    return [
        agreement.first_difference(world, list(each[world.rank]), "the lists") for each in lists
    ]
