"""Jobs of the pool's ranks for the tests of channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dynmo.errors import RankDied, RunError
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.world import World
from dynmo.schedule.lowering import Begun, Channel, Direction, Program
from tests.processes import wait_until

DOWN = Channel(0, Direction.ACTIVATION, 0, 1)


def transport(world: World, messages: int, depth: int, varying: bool = False) -> Transport:
    """One channel, from rank 0 to rank 1."""
    changing = frozenset({DOWN}) if varying else frozenset()
    programs = tuple(
        Program(rank, (rank,), messages, 0, (), {DOWN: depth}, changing) for rank in range(2)
    )
    return Transport(world, programs)


def message(shapes: list[Any], j: int) -> tuple[Tensor, ...]:
    """The tensors of message j, in which every number tells where it belongs."""
    out: list[Tensor] = []
    for dtype, dimensions in shapes:
        count = torch.Size(dimensions).numel()
        out.append(
            (torch.arange(count) + 10 * j + len(out)).to(getattr(torch, dtype)).reshape(dimensions)
        )
    return tuple(out)


def channel(
    world: World,
    steps: list[list[list[Any]]],
    varying: bool,
    depth: int,
    transposed: bool = False,
    again: tuple[int, int] | None = None,
) -> int:
    """Sends messages of steps[s][j] to rank 1, which compares and counts what arrives.

    `again` is what each rank has sent or taken before a step begins again.
    """
    ends = transport(world, len(steps[0]), depth, varying)
    seen = 0
    for shapes in steps:
        ends.open(world.rank == 0 and any(each != shapes[0] for each in shapes))
        if again is not None:
            for j in range(again[world.rank]):
                _ = ends.take(DOWN, j) if world.rank else ends.put(DOWN, j, message(shapes[j], j))
            ends.rewind((Begun(DOWN, *again),) if world.rank else ())
        for j, each in enumerate(shapes):
            sent = message(each, j)
            if world.rank == 0:
                ends.put(DOWN, j, tuple(t.mT.contiguous().mT if transposed else t for t in sent))
            else:
                got = ends.take(DOWN, j)
                assert len(got) == len(sent)
                assert all(
                    a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, sent, strict=True)
                ), (got, sent)
            seen += 1
        ends.flush()
    ends.close()
    return seen


def asked(world: World, varying: bool, ragged: bool) -> list[bool]:
    """Rank 1 asks for the messages after the first, before and after rank 0 has put them."""
    ends = transport(world, 4, 4, varying)
    ends.open(ragged and world.rank == 0)
    told: list[bool] = []
    for j in range(4):
        sent = message([["float32", [2, 3 + j * ragged]], ["int64", [4]]], j)
        if world.rank == 1 and j:
            told.append(ends.arrived(DOWN, j, 0.01))
        world.barrier("rank 1 to have asked")
        if world.rank == 0:
            ends.put(DOWN, j, sent)
            continue
        if j:
            told.append(ends.arrived(DOWN, j, 10.0))
            told.append(ends.arrived(DOWN, j, 0.0))
        got = ends.take(DOWN, j)
        assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True)), (got, sent)
    ends.flush()
    ends.close()
    return told


def asked_of_the_gone(world: World) -> str:
    """Rank 0 puts one message and leaves. Rank 1 asks for the next."""
    ends = transport(world, 2, 2)
    ends.open()
    if world.rank == 0:
        ends.put(DOWN, 0, (torch.zeros(3),))
        ends.flush()
        return ""
    ends.take(DOWN, 0)
    try:
        while not ends.arrived(DOWN, 1, 0.001):
            pass
        ends.take(DOWN, 1)
    except RankDied as error:
        return str(error)
    return ""


def shapes_change(world: World) -> Any:
    ends = transport(world, 3 if world.rank == 0 else 2, 4)
    ends.open()
    for j in range(2):
        if world.rank == 0:
            ends.put(DOWN, j, (torch.zeros(2, 3),))
        else:
            ends.take(DOWN, j)
    ends.flush()
    if world.rank == 1:
        ends.close()
        return 2
    try:
        ends.put(DOWN, 2, (torch.zeros(3, 2),))
    except RunError as error:
        ends.close()
        return str(error)
    return "no error"


def backpressure(world: World, depth: int, messages: int, ragged: bool) -> list[list[int]]:
    """Messages that rank 0 could put before rank 1 began to take the one `depth` before."""
    ends, early = transport(world, messages, depth), list[list[int]]()
    for step in range(2):
        ends.open(ragged and world.rank == 0)
        what = f"{depth}/{ragged}/{step}"
        for j in range(messages):
            if world.rank == 0:
                ends.put(DOWN, j, (torch.zeros(1000 + j * ragged),))
                world.store.set(f"put/{what}/{j}", "1")
                if j >= depth and not world.store.check([f"take/{what}/{j - depth}"]):
                    early.append([step, j])
                continue
            if j == 0:  # the channel fills, if its shapes are known or need not be
                world.store.wait([f"put/{what}/{depth - 1 if step or ragged else 0}"])
            world.store.set(f"take/{what}/{j}", "1")
            ends.take(DOWN, j)
        ends.flush()
        world.barrier("the step to end")
    ends.close()
    return early


def letting_go(world: World, messages: int) -> list[bool]:
    """Tells which messages rank 0 still keeps after rank 1 took half of them."""
    ends = transport(world, messages, messages)
    ends.open()
    refs: list[StorageWeakRef] = []
    for j in range(messages):
        if world.rank == 0:
            tensor = torch.zeros(1000)
            refs.append(StorageWeakRef(tensor.untyped_storage()))
            ends.put(DOWN, j, (tensor,))
            del tensor
        elif j < messages // 2:
            ends.take(DOWN, j)
    world.barrier("half of them to be taken")
    wait_until(lambda: all(ref.expired() for ref in refs[: messages // 2]), 10)
    kept = [not ref.expired() for ref in refs]
    world.barrier("that to be seen")
    for j in range(messages // 2, messages):
        if world.rank == 1:
            ends.take(DOWN, j)
    ends.flush()
    ends.close()
    return kept


def peer_gone(world: World, depth: int) -> list[str]:
    """Rank 1 takes one message of several and goes."""
    ends = transport(world, 30, depth)
    ends.open()
    try:
        if world.rank == 1:
            ends.take(DOWN, 0)
            ends.close()
            del ends  # and with it the receives that are open
            world.close()
            return []
        for j in range(30):
            ends.put(DOWN, j, (torch.zeros(1000),))
        ends.flush()
    except RunError as error:
        return [type(error).__name__, str(error)]
    return []
