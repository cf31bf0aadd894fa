"""Rank 0 fails while a thread of it waits for rank 1.

`RANK_1_ENDS` says when that is: "first", "meanwhile" (rank 0 tells it just before it fails), or
"last" (once rank 0 is gone).
"""

from __future__ import annotations

import contextlib
import os
import threading

import torch

import dynmo
from dynmo.errors import RunError
from dynmo.runtime.comm.meeting import Meeting

waits = threading.Event()


def receive(world: Meeting, peer: int, tag: int) -> None:
    with contextlib.suppress(RunError):
        work = world.receive(torch.zeros(1), peer, tag)
        waits.set()
        world.wait(work, peer, "a message")


with dynmo.init(device="cpu", timeout=30) as world:
    assert isinstance(world, Meeting)
    ends = os.environ["RANK_1_ENDS"]
    if world.rank == 0:
        threading.Thread(target=receive, args=(world, 1, 5), daemon=True).start()
        waits.wait(30)
        if ends == "meanwhile":
            world.wait(world.send(torch.zeros(1), 1, 6), 1, "rank 1 to end")
        raise RunError("refused")
    if ends != "first":
        receive(world, 0, 6 if ends == "meanwhile" else 7)
    os._exit(0)
