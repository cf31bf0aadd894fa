"""Waits on CUDA, tested with a fake device. A busy device is not a late peer."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dynmo.errors import RunError, WaitTimeout
from dynmo.kernels.torch_private import abort_communicators
from dynmo.runtime.comm import headers
from dynmo.runtime.comm import inbox as receiving
from dynmo.runtime.comm.channels import Transport
from dynmo.runtime.comm.headers import Announcement
from dynmo.runtime.comm.heartbeat import ENDED, Heartbeat
from dynmo.runtime.comm.inbox import Inbox, posted_ahead
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.outbox import Outbox
from dynmo.runtime.comm.process_groups import leave_default_group
from dynmo.runtime.comm.process_mesh import arrange
from dynmo.runtime.comm.signed_store import SignedStore
from dynmo.runtime.comm.worker import Worker
from dynmo.runtime.engine import profiler
from dynmo.schedule.lowering import Channel, Direction, Program
from dynmo.schedule.memory import POSTED_AHEAD
from tests.processes import wait_until
from tests.runtime.fake_device import FakeCudaWorld, FakeDevice, FakeWork, fake_world, install
from tests.runtime.fake_time import FakeTime, device_time

DOWN = Channel(0, Direction.ACTIVATION, 0, 1)
SPEC = ((torch.float32, (2,)),)


@pytest.fixture(autouse=True)
def time() -> Iterator[FakeTime]:
    with device_time() as fake:
        yield fake


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Tensors are on the host, whatever device is asked for."""
    for name in ("empty", "ones", "zeros"):
        monkeypatch.setattr(torch, name, partial(_on_host, getattr(torch, name)))
    return install(monkeypatch)


def _on_host(make: Any, *shape: Any, **options: Any) -> Tensor:
    options.pop("device", None)
    return make(*shape, **options)


def outbox(world: FakeCudaWorld, depth: int, varying: bool = False) -> Outbox:
    return Outbox(world, DOWN, varying, depth)


def sent_data(world: FakeCudaWorld) -> list[FakeWork]:
    return [work for work in world.works if not work.host]


# -- sending ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("varying", [False, True])
def test_delivered_message_frees_its_place(varying: bool) -> None:
    """An incomplete header must not hold the place of its message."""
    world = fake_world()
    box = outbox(world, 1, varying)
    for j in range(4):
        box.put(j, (torch.zeros(2, 3),))
        world.works[-1].completed = True
    box.flush()
    leads = [work for work in world.works if work.host]
    assert len(leads) == (4 if varying else 1)
    assert all(work.completed for work in leads)


def test_full_channel_on_an_idle_device_times_out() -> None:
    world = fake_world()
    box = outbox(world, 2)
    box.put(0, (torch.zeros(2),))
    with pytest.raises(WaitTimeout, match=r"rank 1: .*activations? of microbatch 1"):
        box.put(1, (torch.zeros(2),))


def test_timeout_starts_when_the_device_is_idle(device: FakeDevice, time: FakeTime) -> None:
    """The host runs ahead of the device, so a busy device delays messages."""
    world = fake_world(timeout=0.1)
    box = outbox(world, 1)
    box.put(0, (torch.zeros(2),))
    (sent,) = sent_data(world)
    device.given += 1

    def later() -> None:
        device.catch_up()
        sent.completed = True

    time.at(0.4, later)
    box.flush()
    assert 0.4 <= time.now < 0.5


def test_ragged_step_has_the_whole_depth(device: FakeDevice) -> None:
    """The peer posts no receive, so the outbox holds as many messages as the channel."""
    world = fake_world()
    box = outbox(world, 3)
    for ragged, places in ((True, 3), (False, 2), (True, 3)):
        box.open(4)
        for j in range(places):
            box.put(j, (torch.zeros(2, 3 + j * ragged),), ragged)
        with pytest.raises(WaitTimeout, match=r"rank 1: .*activations? of microbatch 3"):
            box.put(3, (torch.zeros(2, 3 + 3 * ragged),), ragged)
        for work in world.works:
            work.completed = True
        box.flush()
        device.catch_up()


# -- receiving -------------------------------------------------------------------------------------


def inbox_of(world: FakeCudaWorld, depth: int) -> Inbox:
    inbox = Inbox(world, DOWN, False, depth, Worker("poster", threaded=False))
    inbox._spec = SPEC
    return inbox


def announce(monkeypatch: pytest.MonkeyPatch, *trains: bool, ragged: bool = False) -> None:
    announced = Announcement(SPEC, trains, ragged)
    monkeypatch.setattr(receiving, "rest_of", lambda lead, what: None)
    monkeypatch.setattr(receiving, "decode", lambda header, device, what: announced)


def ends(world: FakeCudaWorld, messages: int, depth: int) -> Transport:
    return Transport(
        world, tuple(Program(rank, (rank,), messages, (), {DOWN: depth}) for rank in range(2))
    )


def test_missing_message_is_reported_at_the_end_of_the_step(
    device: FakeDevice, time: FakeTime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is reported only when the stream is blocked at the wait."""
    announce(monkeypatch, False)
    monkeypatch.setattr(FakeCudaWorld, "open_channels", lambda self, pairs: None)
    world = fake_world(rank=1)
    channels = ends(world, 2, 2)
    channels.open()
    for j in range(2):
        channels.take(DOWN, j)
    device.done = device.given - 2  # past the first message, before the wait for the second
    time.at(0.4, lambda: setattr(device, "done", device.given - 1))
    with pytest.raises(WaitTimeout, match=r"rank 0: the activations? of microbatch 1"):
        channels.flush()
    assert 0.6 <= time.now < 0.7
    device.catch_up()
    channels.flush()


@pytest.mark.parametrize("depth", [1, 2, 20])
def test_at_most_one_receive_is_posted_on_the_device(depth: int) -> None:
    world = fake_world(rank=1)
    inbox_of(world, depth).open(10)
    posted = len(sent_data(world))
    assert posted == min(1, depth - 1)
    # Sender and receiver must agree on what may be on its way.
    assert outbox(world, depth)._depth == depth - posted


def test_ragged_step_posts_no_receive_ahead_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is posted for the step before is filled first."""
    announce(monkeypatch, True, ragged=True)
    world = fake_world(rank=1)
    inbox = inbox_of(world, 20)
    for filler in (1, 0):
        world.works.clear()
        inbox.open(3)
        for j in range(3):
            assert len(sent_data(world)) == filler + j
            (tensor,) = inbox.take(j)
            assert tensor.requires_grad
        assert inbox.ragged


# -- channels --------------------------------------------------------------------------------------


class FakeGroups:
    """torch's process groups, made by name only."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.created: list[tuple[int, ...]] = []
        patch.setattr(dist, "new_group", self._make)
        patch.setattr(dist, "get_world_size", lambda: 0)

    def _make(self, ranks: Sequence[int], *_: Any, **options: Any) -> FakeGroups:
        self.created.append(tuple(ranks))
        return self

    def _get_backend(self, device: torch.device) -> FakeGroups:
        return self

    def _set_default_timeout(self, timeout: Any) -> None:
        assert timeout.days > 1


@pytest.fixture
def groups(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    monkeypatch.setattr(FakeCudaWorld, "settle", lambda self: device.catch_up())
    return FakeGroups(monkeypatch)


def opened(world: FakeCudaWorld, keys: list[tuple[int, ...]]) -> list[str]:
    """The messages that pass over the channels as they open."""
    before = len(world.works)
    world.open_channels(keys)
    return [work.what for work in world.works[before:]]


def test_both_ends_open_channels_in_the_same_order(groups: FakeGroups) -> None:
    keys = [(0, 0, 1), (1, 1, 0), (2, 1, 2)]
    assert opened(fake_world(0, 3), keys) == ["send 1", "receive 1"]
    assert opened(fake_world(1, 3), keys) == ["receive 0", "send 0", "send 2"]
    assert opened(fake_world(2, 3), keys) == ["receive 1"]
    assert groups.created == [(0, 1), (0, 1), (1, 2)] * 3, "all ranks make all groups"


def test_repeated_mesh_shape_reuses_its_channels(
    groups: FakeGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks are one pipeline, then two replicas, then one pipeline again."""
    world, keys = fake_world(0, 4), [(0, 0, 1), (0, 1, 2), (0, 2, 3)]
    monkeypatch.setattr(
        "dynmo.runtime.comm.meeting.RankGroup", lambda *given: FakeCudaWorld(*given)
    )
    monkeypatch.setattr("dynmo.runtime.comm.process_groups.prove", lambda *given: None)
    monkeypatch.setattr(FakeCudaWorld, "largest", lambda self, table, what: table)
    assert opened(world, keys) == ["send 1"]
    view: Any = arrange(world, 2)
    before = len(groups.created)
    assert opened(view, keys[:1]) == ["send 1"]
    assert groups.created[before:] == [(0, 2), (1, 3)]
    assert opened(world, keys) == []
    regrouped: Any = arrange(world, 2)
    assert opened(regrouped, keys[:1]) == []
    assert len(groups.created) == before + 2


@pytest.mark.parametrize(
    ("rank", "order"), [(0, ["send 1", "receive 1"]), (1, ["receive 0", "send 0"])]
)
def test_links_are_measured_in_turns(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch, rank: int, order: list[str]
) -> None:
    """Both directions share one stream: two receives that come first would wait for ever."""
    world = fake_world(rank)
    monkeypatch.setattr(type(world), "settle", lambda self: device.catch_up())
    monkeypatch.setattr(profiler, "PAUSE", 0.0)
    assert profiler._ping(world, 1 - rank, 8, 2) >= 0
    assert [work.what for work in world.works] == order * 3


# -- ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failed", "cuda", "aborts"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_a_failed_run_does_not_wait_for_messages(
    failed: bool, cuda: bool, aborts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Communicators would otherwise wait for all enqueued work, and hide the cause."""
    done: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: not done)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    torch_dist = dist.distributed_c10d
    monkeypatch.setattr(torch_dist, "_abort_process_group", lambda: done.append("aborted"))
    world = (
        fake_world()
        if cuda
        else Meeting(0, 2, torch.device("cpu"), 1.0, 0, SignedStore(dist.HashStore()))
    )
    with pytest.raises(RunError) if failed else nullcontext(), world:
        if failed:
            raise RunError("the cause")
    assert done == (["aborted"] if aborts else ["destroyed"])


def test_a_standing_stream_is_left_once_another_rank_has_told_the_end() -> None:
    """NCCL does not raise when a peer is gone. The heartbeat's thread hears of it."""
    world = fake_world(timeout=1.0)
    world.heartbeat = Heartbeat(world, world.store, 1.0, 1.0)
    world.heartbeat.is_quick = True
    try:
        world.wait(world.receive(torch.zeros(1), 1, 0), 1, "a message")
        cast(FakeDevice, torch.cuda.current_stream(None)).done = 1  # it stands at the message
        world.store.set(ENDED, "rank 2 was killed")
        with pytest.raises(WaitTimeout, match="a message: rank 2 was killed"):
            world.settle()
    finally:
        world.heartbeat.close()


def test_groups_are_aborted_from_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that waits for a dead peer cannot do it. All groups end, and new ones may come."""
    aborted = threading.Event()
    group = mock.Mock(abort=aborted.set)
    torch_world = dist.distributed_c10d._world
    for _ in range(2):
        aborted.clear()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        monkeypatch.setitem(torch_world.pg_names, group, "1")
        threading.Thread(target=abort_communicators).start()
        assert aborted.wait(10)
        wait_until(lambda: not dist.is_initialized())
        leave_default_group()


def test_a_staged_world_waits_on_the_host(device: FakeDevice) -> None:
    """The rank computes on a GPU and sends its messages with gloo."""
    world = fake_world()
    world.staged = True
    assert not world.enqueues
    world.open_channels([(0, 0, 1)])
    world.wait(world.receive(torch.zeros(1), 1, 0), 1, "a message")
    assert (device.given, [work.what for work in world.works]) == (0, ["receive 1"])
    assert posted_ahead(world, 32, varying=False) == POSTED_AHEAD
    assert posted_ahead(fake_world(), 32, varying=False) == 1


def test_unsupported_dtypes_travel_as_bytes() -> None:
    """The bytes share the memory of the tensor."""
    for dtype in headers.DTYPES.values():
        tensor = torch.zeros(3, 2, dtype=dtype)
        assert headers.on_wire(tensor) is tensor, "gloo takes them all"
        flat = headers.as_bytes(tensor)
        assert (flat.dtype, flat.numel()) == (torch.uint8, tensor.nbytes)
        assert flat.data_ptr() == tensor.data_ptr()
        assert headers.as_bytes(torch.zeros((), dtype=dtype)).numel() == dtype.itemsize
