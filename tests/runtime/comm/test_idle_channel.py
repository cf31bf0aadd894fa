"""Threads beside a rank's own."""

from __future__ import annotations

import threading
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dynmo.errors import RankDied
from dynmo.runtime.comm.headers import TAG_COPY
from dynmo.runtime.comm.idle_channel import IdleChannel
from dynmo.runtime.comm.meeting import Meeting
from dynmo.runtime.comm.signed_store import SignedStore


def test_a_thread_that_outlives_its_generation_sends_nothing_in_the_next_one() -> None:
    """It may copy for seconds, and `close` waits for half of one."""
    world = Meeting.join(SignedStore(dist.HashStore()), 0, 1)
    channel, may_go_on = IdleChannel(world, TAG_COPY, "the copies of layers"), threading.Event()
    world.channels.add(channel)

    def work() -> None:
        may_go_on.wait(10)
        channel.put_tensor(torch.ones(3), 0)

    channel.send_by(work, [])
    world.renew(0, 1, 1, 1.0)
    with mock.patch.object(world, "send") as send:
        may_go_on.set()
        with pytest.raises(RankDied, match="met anew while the copies of layers were under way"):
            channel.wait()
    send.assert_not_called()
    channel.close()
    world.close()
