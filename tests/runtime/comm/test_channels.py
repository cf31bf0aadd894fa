"""Channels deliver messages of any shape in order. A sender waits if a channel is full."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dynmo.errors import RankDied, RunError
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.headers import DTYPES, LEAD, Announcement, decode, encode, obstacle, rest_of
from dynmo.runtime.comm.inbox import Inbox
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.worker import Worker
from dynmo.schedule.lowering import Begun, Channel, Direction, Program
from tests.combinations import mostly_matrix
from tests.pool import Pool
from tests.processes import wait_until
from tests.runtime.alone import alone
from tests.runtime.jobs import error_of

DOWN = Channel(0, Direction.ACTIVATION, 0, 1)


def transport(world: Meeting, messages: int, depth: int, varying: bool = False) -> Transport:
    """One channel, from rank 0 to rank 1."""
    changing = frozenset({DOWN}) if varying else frozenset()
    programs = tuple(
        Program(rank, (rank,), messages, (), {DOWN: depth}, changing) for rank in range(2)
    )
    return Transport(world, programs)


def message(shapes: list[Any], j: int) -> tuple[Tensor, ...]:
    """The tensors of message j, in which every number tells where it belongs."""
    return tuple(
        (torch.arange(math.prod(size)) + 10 * j + place).to(getattr(torch, dtype)).reshape(size)
        for place, (dtype, size) in enumerate(shapes)
    )


def channel(
    world: Meeting,
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
                torch.testing.assert_close(tuple(ends.take(DOWN, j)), sent, rtol=0, atol=0)
            seen += 1
        ends.flush()
    ends.close()
    return seen


def shapes_change(world: Meeting) -> list[str]:
    ends = transport(world, 3 if world.rank == 0 else 2, 4)
    ends.open()
    for j in range(2):
        if world.rank == 0:
            ends.put(DOWN, j, (torch.zeros(2, 3),))
        else:
            ends.take(DOWN, j)
    ends.flush()
    said = error_of(lambda: ends.put(DOWN, 2, (torch.zeros(3, 2),))) if world.rank == 0 else []
    ends.close()
    return said


def backpressure(world: Meeting, depth: int, messages: int, ragged: bool) -> list[list[int]]:
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


def letting_go(world: Meeting, messages: int) -> list[bool]:
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


def peer_gone(world: Meeting, depth: int) -> list[str]:
    """Rank 1 takes one message of several and goes."""
    ends = transport(world, 30, depth)
    ends.open()
    if world.rank == 1:
        ends.take(DOWN, 0)
        ends.close()
        del ends  # and with it the receives that are open
        world.close()
        return []

    def send() -> None:
        for j in range(30):
            ends.put(DOWN, j, (torch.zeros(1000),))
        ends.flush()

    return error_of(send)


JOBS = "tests.runtime.comm.test_channels:"
PLAIN = [["float32", [2, 3]]]
SEVERAL = [["float32", [2, 3]], ["int64", [4]], ["bool", [2]]]
SEVERAL += [["bfloat16", [1, 2]], ["float64", []], ["uint8", [0, 3]]]
MANY = [[name, [1, place % 3]] for place, name in enumerate([*DTYPES] * 20)]
VARYING = [[["float32", [1 + j % 4, j]]] * (1 + j % 3) for j in range(10)]
STEPS = {
    "plain": [[PLAIN] * 10] * 3,
    "several": [[SEVERAL] * 10] * 3,
    "many": [[MANY] * 10] * 3,
    "varying": [VARYING, VARYING[::-1]],
    # Receives that are posted for the old shape are filled first.
    "other": [[shapes] * 10 for shapes in (PLAIN, SEVERAL, SEVERAL, MANY, PLAIN)],
}
WHAT = "the activations from rank 0 to rank 1"
CPU = torch.device("cpu")


def test_header_round_trips_and_damage_is_detected() -> None:
    spec = ((torch.float32, (2, 3)), (torch.int64, ()), (torch.bool, (0, 5)))
    for announced in (
        Announcement(spec, (True, False, False)),
        Announcement(spec, (False, False, False), ragged=True),
        Announcement((), ()),
    ):
        assert decode(encode(announced), CPU, WHAT) == announced
    every = tuple((dtype, (1, place)) for place, dtype in enumerate(DTYPES.values())) * 20
    many = Announcement(every, (False,) * len(every), ragged=True)
    lead, rest = encode(many)
    room = rest_of(lead, WHAT)
    assert room is not None
    assert (len(lead), room.shape) == (LEAD, rest.shape)
    assert decode((lead, rest), CPU, WHAT) == many
    for damaged, reason in (
        ([-1], "it announces -1 numbers"),
        ([0], "it announces 0 numbers"),
        ([2**40], "it announces 1099511627776 numbers"),
        ([5, 0, 0, 0, 2, 5], r"it announces a tensor of dtype 0 and 2 dimensions, \(5,\)"),
        ([5, 0, 99, 0, 1, 5], "dtype 99 and 1 dimensions"),
        ([5, 0, 0, 0, 1, -5], r"dtype 0 and 1 dimensions, \(-5,\)"),
        ([6, 0, 0, 0, 2, 2**30, 2**30], f"it announces {2**62} bytes"),
    ):
        lead = torch.tensor(damaged + [0] * (LEAD - len(damaged)))
        with pytest.raises(RunError, match=f"{WHAT}: .*{reason}"):
            decode((lead,) if rest_of(lead, WHAT) is None else (lead, rest), CPU, WHAT)


def test_unsupported_tensors_are_refused() -> None:
    assert obstacle(torch.zeros(2)) is None
    cannot = "which cannot travel"
    for tensor, reason in (
        (
            torch.zeros(1).to(torch.complex64),
            f"torch.complex64, {cannot}; let it hand on torch.view_as_real",
        ),
        (torch.zeros(1).to(torch.float8_e5m2), f"torch.float8_e5m2, {cannot}; known are float32"),
        (torch.zeros(1, 1).to_sparse(), f"a torch.sparse_coo tensor, {cannot}"),
        (torch.zeros((1,) * 65), f"65 dimensions, {cannot}; at most 64 can"),
    ):
        assert reason in (obstacle(tensor) or "")


@pytest.mark.parametrize(
    ("steps", "varying", "depth"),
    mostly_matrix(
        product(STEPS, (False, True), (1, 3, 20)),
        everyday=[
            ("plain", False, 1),
            ("several", False, 20),
            ("many", True, 3),
            ("varying", True, 1),
            ("varying", False, 3),
            ("other", False, 20),
        ],
    ),
)
def test_messages_arrive_in_order(pool: Pool, steps: str, varying: bool, depth: int) -> None:
    done = pool.run(JOBS + "channel", 2, steps=STEPS[steps], varying=varying, depth=depth)
    assert done == [sum(map(len, STEPS[steps]))] * 2


@pytest.mark.parametrize(
    ("depth", "again"),
    mostly_matrix(product((3, 20), (None, (0, 0), (1, 0), (3, 2))), everyday=[(3, (3, 2))]),
)
def test_steps_may_be_ragged_or_alike(
    pool: Pool, depth: int, again: tuple[int, int] | None
) -> None:
    """Each kind of step follows each other, also if steps begin again."""
    ragged = [PLAIN, SEVERAL, MANY, [], SEVERAL] * 2
    short = [[["float32", [1 + j]]] for j in range(10)]
    steps = [[PLAIN] * 10, ragged, ragged, short, [MANY] * 10, [MANY] * 10, ragged, [PLAIN] * 10]
    steps += [[PLAIN] * 9 + [SEVERAL], [PLAIN] * 10]
    done = pool.run(JOBS + "channel", 2, steps=steps, varying=False, depth=depth, again=again)
    assert done == [100, 100]


def test_non_contiguous_tensors_arrive_intact(pool: Pool) -> None:
    options = {"varying": False, "depth": 4, "transposed": True}
    assert pool.run(JOBS + "channel", 2, steps=[[PLAIN] * 4], **options) == [4, 4]


def test_a_changed_shape_is_an_error(pool: Pool) -> None:
    (_, sender), _ = pool.run(JOBS + "shapes_change", 2)
    assert sender.startswith("the activations from rank 0 to rank 1 changed shape from")
    assert "at microbatch 2; pad the tensors, or give the layer" in sender


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("depth", [1, 12])
def test_channel_depth_limits_messages_in_flight(pool: Pool, depth: int, ragged: bool) -> None:
    """Once shapes are known, the channel also accepts that many."""
    early = pool.run(JOBS + "backpressure", 2, depth=depth, messages=16, ragged=ragged)
    assert early == [[], []]


def test_taken_messages_are_released(pool: Pool) -> None:
    """Taken messages are not kept to the end of the step."""
    kept, _ = pool.run(JOBS + "letting_go", 2, messages=40)
    assert not any(kept[:20])
    assert kept[-1], "what has not been taken must stay"


@pytest.mark.parametrize("depth", mostly_matrix([1, 20], everyday=[20]))
def test_dead_peer_is_named_at_once(pool: Pool, depth: int) -> None:
    """It does not wait for the timeout of 20 s."""
    (kind, text), _ = pool.run(JOBS + "peer_gone", 2, depth=depth)
    assert kind == "RankDied", text
    assert text.startswith("rank 0 lost rank 1 while waiting for room")


def test_failed_receive_is_reported_at_once() -> None:
    poster = Worker("poster", threaded=True)
    poster.error = RankDied("the peer is gone")
    world = alone()
    world.timeout = 10_000.0
    inbox = Inbox(world, Channel(0, Direction.ACTIVATION, 1, 0), True, 4, poster)
    inbox.open(1)
    with pytest.raises(RankDied, match="the peer is gone"):
        inbox.take(0)
    poster.close()
