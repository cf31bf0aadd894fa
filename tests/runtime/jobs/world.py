"""Jobs of the pool's ranks for the tests of the world."""

from __future__ import annotations

import contextlib

import torch

from dynmo.errors import DynmoError, RankDied, WaitTimeout
from dynmo.runtime.comm import agreement
from dynmo.runtime.comm.world import World


def _again(world: World, size: int, timeout: float) -> World:
    """Another generation of the job's ranks, with little patience."""
    world.barrier("all to be here")
    world.close()
    return World.join(world.store, world.rank, size, timeout=timeout, generation=1)


def one_never_comes(world: World) -> list[str]:
    try:
        _again(world, world.size + 1, 2.0)
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
    impatient = _again(world, 2, 20 if what == "gone" else 1.5)
    caught: list[str] = []
    try:
        if world.rank == 1 and what == "gone":
            impatient.close()
        elif world.rank == 1:
            world.store.wait(["named"])
        elif what == "sum":
            impatient.sum(torch.zeros(1), "the end of the test")
        else:
            impatient.wait(
                impatient.receive(torch.zeros(1), 1, 0), 1, "the activation of microbatch 3"
            )
    except (WaitTimeout, RankDied) as error:
        caught = [type(error).__name__, str(error)]
    if world.rank == 0:
        world.store.set("named", "1")
    return caught


def agree(world: World, said: list[str | None]) -> str:
    try:
        agreement.agree(world, said[world.rank], "the plan")
    except DynmoError as error:
        return str(error)
    return ""


def compare(world: World, lists: list[str]) -> tuple[int, list[int]] | None:
    return agreement.first_difference(world, list(lists[world.rank]), "the lists")
